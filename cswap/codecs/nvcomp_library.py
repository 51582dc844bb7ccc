"""nvCOMP's Python library: a check that it works here, its scratch memory, its codec objects.

nvCOMP is proprietary and optional. It is imported when a codec that needs it is requested, by name
or by ``codec="auto"`` for a tensor on a GPU, and never where it is not installed.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import threading
import weakref
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.errors import ConfigError
from cswap.install_hint import to_install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Options = Mapping[str, object]
    """Keyword arguments of ``nvidia.nvcomp.Codec``."""

WANTED: Final = "6.0."
"""The required version. Enumerations, options and the stream of ANS changed between 5 and 6.0."""

MODULE: Final = "nvidia.nvcomp"

CHUNK_BYTES: Final = 1 << 16
"""Raw bytes of a chunk, which nvCOMP encodes independently of others: nvCOMP's default."""

MAX_CONFIGS: Final = 512
"""Number of sizes for which a codec object keeps the configuration."""


@cache
def is_installed() -> bool:
    """Whether there is an nvCOMP to import, of any version. It is not imported."""
    try:
        return importlib.util.find_spec(MODULE) is not None
    except ModuleNotFoundError:  # nothing of NVIDIA's is installed
        return False
    except Exception:  # it is there, and `missing` gives the reason why it does not work
        return True


def failure() -> str | None:
    """Why an installed nvCOMP cannot be used here; None: it can, or none is installed."""
    return (missing() or _refusal()) if is_installed() else None


@cache
def missing() -> str | None:
    """The reason why nvCOMP cannot be used here, with a remedy; else None. Uses no GPU."""
    extra = f"cuda{(torch.version.cuda or '13').partition('.')[0]}"
    install = to_install(extra)
    if not is_installed():
        return f"needs nvCOMP (it is not installed). Install it: {install}."
    try:
        nvcomp = importlib.import_module(MODULE)
    except Exception as error:  # its shared library may fail to load
        return f"needs nvCOMP ({error}). Install it: {install}."
    version = str(getattr(nvcomp, "__version__", "unknown"))
    if not version.startswith(WANTED):
        return f"needs nvCOMP {WANTED}*, but {version} is installed. Replace it: {install}."
    if not torch.cuda.is_available():
        return "needs a CUDA device, and torch sees none. `cswap doctor` says why."
    return None


def require(codec: str) -> None:
    """Raise an error if nvCOMP cannot be used.

    Raises:
        ConfigError: names the missing part and the remedy. Its cause is an ImportError, as with
            every missing package, because the request for the codec itself may be right.
    """
    reason = missing() or _refusal()
    if reason is not None:
        raise ConfigError(f"codec={codec!r}: {reason}") from ImportError(reason)


@cache
def _refusal() -> str | None:
    # nvCOMP's own reason against this machine, such as an old driver.
    try:
        library().Codec(algorithm="LZ4", device_id=torch.cuda.current_device())
    except Exception as error:
        return f"nvCOMP does not work here: {error} Update the driver, or take another nvCOMP."
    return None


@cache
def library() -> Any:
    """Import ``nvidia.nvcomp`` and make it take its scratch memory from torch."""
    nvcomp = importlib.import_module(MODULE)
    nvcomp.set_device_allocator(allocate)
    # Without this, nvCOMP releases the allocator after the end of the interpreter, and the process
    # crashes.
    atexit.register(nvcomp.set_device_allocator, None)
    return nvcomp


class Block:
    """A block of nvCOMP's scratch memory. It is freed with its last reference."""

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def allocate(nbytes: int, stream: Any) -> Block:
    """A block for nvCOMP, of torch's caching allocator, which counts it.

    By default nvCOMP uses cudaMallocAsync, a second pool whose memory torch cannot reuse. The
    setting applies to every use of nvCOMP in this process.

    Args:
        nbytes: of the block.
        stream: nvCOMP's, with ``ptr`` and ``device``.
    """
    address = torch.cuda.caching_allocator_alloc(nbytes, stream.device, stream.ptr)
    block = Block(address)
    # Runs when nvCOMP releases the block. The memory returns to its stream's pool. So pending work
    # of this stream on it comes before the next use.
    end = weakref.finalize(block, torch.cuda.caching_allocator_delete, address)
    end.atexit = False  # the allocator may be gone at exit
    return block


class Coder:
    """One nvCOMP codec object, for one device, stream and thread."""

    def __init__(self, options: Options, device: int, stream: int) -> None:
        nvcomp = self._nvcomp = library()
        self._stream = stream
        self._codec = nvcomp.Codec(
            **options,
            device_id=device,
            cuda_stream=stream,
            uncomp_chunk_size=CHUNK_BYTES,
            bitstream_kind=nvcomp.BitstreamKind.NVCOMP_NATIVE,
        )
        self._configs: dict[int, tuple[Any, Any]] = {}

    def encode(self, source: torch.Tensor, out: torch.Tensor) -> Any:
        """Encode source [n] uint8 into out; the array's ``buffer_size`` waits for the encode."""
        config, _ = self._config(source.numel())
        array = self._nvcomp.as_array(source, cuda_stream=self._stream)
        # An array of nvCOMP's own is shrunk to the encoding, in place. A foreign buffer would come
        # back as it is, and the encoding's size would be lost.
        target = self._nvcomp.as_array(out, cuda_stream=self._stream)
        return self._codec.encode(array, out=target, compression_config=config)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Decode payload into out [n] uint8. Never waits, and so does not detect damage."""
        _, config = self._config(out.numel())
        array = self._nvcomp.as_array(payload, cuda_stream=self._stream)
        # `out` is passed as a foreign buffer, because nvCOMP would resize an array of its own.
        self._codec.decode(array, data_type="|u1", out=out, decompression_config=config)

    def _config(self, nbytes: int) -> tuple[Any, Any]:
        # Made from a size, because a configuration from a payload would wait for the stream.
        found = self._configs.get(nbytes)
        if found is None:
            if len(self._configs) >= MAX_CONFIGS:
                self._configs.clear()
            forward = self._codec.compression_config(nbytes)
            found = self._configs[nbytes] = (forward, self._codec.decompression_config(forward))
        return found


class _Coders(threading.local):
    def __init__(self) -> None:
        self.made: dict[tuple[object, ...], Coder] = {}


_coders = _Coders()


def coder(make: Callable[[], Options], key: str, device: int, stream: int) -> Coder:
    """This thread's `Coder` for a device and a stream.

    Args:
        make: returns the options; called if the coder does not exist yet.
        key: name of these options.
        device: index of the device.
        stream: address of the stream; must not be 0, which nvCOMP's arrays treat as no stream.
    """
    found = _coders.made.get((key, device, stream))
    if found is None:
        found = _coders.made[key, device, stream] = Coder(make(), device, stream)
    return found


@contextmanager
def running_on(
    stream: torch.cuda.Stream | None, device: torch.device
) -> Iterator[torch.cuda.Stream]:
    """Yield a stream with an address; its work runs between past and later work of ``stream``."""
    caller = stream or torch.cuda.current_stream(device)
    own = caller if caller.cuda_stream else _own_stream(device.index, "default")
    if own is not caller:
        own.wait_stream(caller)
    with torch.cuda.stream(own):
        yield own
    if own is not caller:
        caller.wait_stream(own)


def copy_now(out: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors that no work uses; wait for the copy and for nothing else."""
    device = source.device
    stream = _own_stream(device.index, "copy")
    with torch.cuda.stream(stream):
        out.copy_(source, non_blocking=True)
    stream.synchronize()


@cache
def _own_stream(device: int, _use: str) -> torch.cuda.Stream:
    with torch.cuda.device(device):
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]
