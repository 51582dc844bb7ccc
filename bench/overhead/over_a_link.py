"""The Python time of a tensor's way over a link, where the device's calls take no time.

A stub takes the place of `torch.cuda`: its streams and events do nothing, and every event has fired
when somebody looks. Copies and kernels do nothing, either. The rest is cswap's own Python, and the
calls of the stub. The processor time of all threads counts, callbacks included.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch

from cswap.codecs import registry
from cswap.codecs.base import Codec, EncodeKey, LateSize, Stream
from cswap.config import SwapConfig
from cswap.devices import cuda as device_module
from cswap.devices import cuda_callbacks, cuda_events
from cswap.engine.engine import SwapEngine
from cswap.experiments.meters.timing import Timing, timing_of

if TYPE_CHECKING:
    from collections.abc import Iterator

TENSORS: Final = 50
"""Tensors of a step."""

NUMEL: Final = 1 << 12
"""Elements of a tensor; nothing reads or writes them."""

SETTLING: Final = 10
"""Steps before the counted ones."""

LATE: Final = "late"
"""A codec whose encoded size the host learns when the encode has run, as zvc's on a GPU."""


class _Size:
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def value(self) -> int:
        return self._nbytes


class _Late(Codec):
    name = LATE
    lossless = True
    max_ratio = 2

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        return True

    def bound(self, dtype: torch.dtype, numel: int) -> int:
        return numel * dtype.itemsize

    def encode_flat(
        self, x: torch.Tensor, out: torch.Tensor, *, key: EncodeKey, stream: Stream | None
    ) -> int | LateSize:
        return _Size(x.nbytes // 2)

    def decode_flat(
        self, payload: torch.Tensor, out: torch.Tensor, *, stream: Stream | None
    ) -> None:
        pass


class IdleStream:
    """A stream on which nothing is ever under way; it is its own event."""

    threads = 1

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = id(self)

    def wait_event(self, event: object) -> None:
        """Nothing is waited for."""

    def wait_stream(self, stream: object) -> None:
        """Nor here."""

    def record_event(self) -> object:
        """An event that has fired."""
        return self

    def synchronize(self) -> None:
        """Nor here."""


class _Event:
    def __init__(self, **_: object) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _end: object) -> float:
        return 0.01  # milliseconds


def _streams() -> SimpleNamespace:
    # For cswap.cuda_streams.
    compute = IdleStream()
    return SimpleNamespace(
        current=lambda _index: compute,
        before=lambda _index: None,
        enter=lambda _stream: None,
        leave=lambda _before: None,
        is_capturing=lambda: False,
    )


def _stub() -> SimpleNamespace:
    # What the device's modules use of torch.
    cuda = SimpleNamespace(
        Stream=IdleStream,
        Event=_Event,
        device=lambda _index: nullcontext(),
        OutOfMemoryError=torch.cuda.OutOfMemoryError,
        get_device_properties=lambda _index: SimpleNamespace(total_memory=80 << 30),
        set_device=lambda _index: None,
        memory_allocated=lambda _index: 0,
        empty_cache=lambda: None,
        synchronize=lambda _device=None: None,
    )
    here = torch.device("cpu")
    return SimpleNamespace(
        cuda=cuda,
        device=lambda *_: here,
        empty=lambda numel, dtype, device=None: torch.empty(numel, dtype=dtype),
        empty_strided=lambda sizes, strides, dtype, device: torch.empty_strided(
            sizes, strides, dtype=dtype
        ),
        uint8=torch.uint8,
    )


@contextmanager
def idle_device() -> Iterator[Any]:
    """A CUDA device whose calls do nothing."""

    def nothing(*_: object) -> None:
        pass

    stub = _stub()
    with ExitStack() as stack:
        enter = stack.enter_context
        for module in (device_module, cuda_callbacks, cuda_events):
            enter(patch.object(module, "torch", stub))
        enter(patch.object(device_module, "cuda_streams", _streams()))
        enter(patch.object(device_module, "memcpy_async", lambda: nothing))
        enter(patch.object(torch.Tensor, "record_stream", nothing))
        enter(patch.object(device_module.CudaDevice, "kind", "cpu"))  # its tensors are
        enter(patch.dict(registry._registered, {LATE: _Late}))  # noqa: SLF001
        device = device_module.CudaDevice(0)
        enter(patch.object(device, "host_memory", lambda n: torch.empty(n, dtype=torch.uint8)))
        try:
            yield device
        finally:
            device._callbacks.end()  # noqa: SLF001 - its thread uses the stub


def measure(steps: int) -> dict[str, Timing]:
    """Processor time per tensor, of all threads, by codec.

    Args:
        steps: counted steps of each.
    """
    codecs = {"raw": "raw", LATE: "a codec whose size is known late"}
    with idle_device() as made:
        return {name: timing_of(_seconds(codec, made, steps)) for codec, name in codecs.items()}


def _seconds(codec: str, device: Any, steps: int) -> list[float]:
    engine = SwapEngine(SwapConfig(codec=codec, min_bytes=0), device=device)
    found = []
    for step in range(SETTLING + steps):
        engine.begin_step()
        tensors = [torch.empty(NUMEL) for _ in range(TENSORS)]
        start_s = time.process_time()
        packed = [engine.pack(tensors.pop()) for _ in range(TENSORS)]
        while packed:
            engine.unpack(packed.pop())
        engine.collect()
        if step >= SETTLING:
            found.append((time.process_time() - start_s) / TENSORS)
    swapped = engine.stats.swapped
    engine.close()
    assert swapped > steps * TENSORS / 2  # some are wanted before they have left
    return found
