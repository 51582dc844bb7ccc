"""`CudaDevice` on the stand-in for `torch.cuda`: streams, copies and codecs that it watches."""

from __future__ import annotations

import ctypes
import threading
import types
from typing import TYPE_CHECKING, Any, Final

import torch

from bench.twin.lagging_cuda import LaggingCuda, LateSize, memory_at

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_ONCE: Final = "bf16"
"""A codec that tells its sizes at once, as those of other packages may."""


def watched(cuda: LaggingCuda, codec: Any) -> Any:
    """Wrap a codec: memory accesses are checked, and sizes that vary are known late."""

    class Watched(type(codec)):  # type: ignore[misc]
        def encode_flat(self, x: Any, out: Any, *, key: Any, stream: Any) -> Any:
            cuda.touch(x, writes=False, text="encode")
            cuda.touch(out, writes=True, text="encode")
            nbytes = codec.encode_flat(x, out, key=key, stream=stream)
            at_once = codec.name == AT_ONCE
            return nbytes if stream is None or at_once else LateSize(cuda, nbytes)

        def decode_flat(self, payload: Any, out: Any, *, stream: Any) -> None:
            cuda.touch(payload, writes=False, text="decode")
            cuda.touch(out, writes=True, text="decode")
            codec.decode_flat(payload, out, stream=stream)

    made = object.__new__(Watched)
    made.__dict__.update(codec.__dict__)
    return made


def streams_of(cuda: Any) -> types.SimpleNamespace:
    """`cswap.cuda_streams` for a stand-in with ``current_stream`` and ``stream``."""
    here = _Entered()

    def enter(stream: Any) -> int:
        before = len(here.entered)
        on = cuda.stream(stream)
        on.__enter__()
        here.entered.append(on)
        return before  # of engines before 2026-11-28, for `bench twin --validate`

    def leave(before: int) -> None:
        while len(here.entered) > before:
            here.entered.pop().__exit__(None, None, None)

    return types.SimpleNamespace(
        current=lambda _index: cuda.current_stream(),
        before=lambda _index: len(here.entered),
        enter=enter,
        leave=leave,
        is_capturing=cuda.is_current_stream_capturing,
        spin=lambda seconds: cuda.spin(seconds),
    )


class _Entered(threading.local):
    # Contexts of streams that this thread has entered.
    def __init__(self) -> None:
        self.entered: list[Any] = []


def installed(cuda: LaggingCuda, patch: Any) -> Iterator[Any]:
    """Make `CudaDevice` run on the stand-in, and yield one. ``patch``: pytest's monkeypatch."""
    from cswap.devices import cuda as module
    from cswap.devices import cuda_events, stopwatch

    real = torch
    stand_in = types.SimpleNamespace(
        cuda=cuda,
        device=lambda *_: real.device("cpu"),
        empty=cuda.empty,
        empty_strided=cuda.empty_strided,
        uint8=real.uint8,
    )

    for user in (module, cuda_events):
        patch.setattr(user, "torch", stand_in)
    for streams_user in (module, stopwatch):
        patch.setattr(streams_user, "cuda_streams", streams_of(cuda))

    def memcpy(target: int, source: int, nbytes: int, _direction: int, stream: int) -> None:
        on = next(s for s in cuda.streams if s.cuda_stream == stream)
        with cuda.stream(on):
            cuda.touch(memory_at(source, nbytes), writes=False, text="copy")
            cuda.touch(memory_at(target, nbytes), writes=True, text="copy")
            ctypes.memmove(target, source, nbytes)

    patch.setattr(module, "memcpy_async", lambda: memcpy)
    patch.setattr(real.Tensor, "record_stream", lambda x, s: cuda.record_stream(x, s))
    patch.setattr(module.CudaDevice, "kind", "cpu")  # the engine gives it CPU tensors
    device = module.CudaDevice(0)
    patch.setattr(device, "host_memory", lambda n: cuda.empty(n, dtype=real.uint8), raising=True)
    yield device
