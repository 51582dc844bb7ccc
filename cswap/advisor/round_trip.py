"""Measures a codec on a tensor by running it; and numbers to measure with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import torch

from cswap.codecs.base import DEFAULT_KEY
from cswap.devices.cpu import CpuStream

if TYPE_CHECKING:
    from cswap.codecs.base import Codec, Stream

ONE_THREAD: Final = CpuStream(1)
"""One thread, so that the cores of a machine do not count."""


def round_trip(
    codec: Codec, x: torch.Tensor, *, repeat: int = 2, all_threads: bool = False
) -> tuple[int, float, float]:
    """(encoded bytes, encode seconds, decode seconds) of x [n], flat: the fastest of ``repeat``.

    The first call of a codec for a dtype compiles its kernels: call it once before.

    Args:
        codec: the codec.
        x: the values.
        repeat: number of round trips.
        all_threads: on a CPU, use all threads instead of one.
    """
    out = torch.zeros(codec.bound(x.dtype, x.numel()), dtype=torch.uint8, device=x.device)
    back = torch.zeros_like(x)
    nbytes, encode_s, decode_s = 0, float("inf"), float("inf")
    stream: Stream | None = None if x.is_cuda or all_threads else ONE_THREAD
    for _ in range(repeat):
        start = _now(x)
        size = codec.encode_flat(x, out, key=DEFAULT_KEY, stream=stream)
        encode_s = min(encode_s, _now(x) - start)
        nbytes = size if isinstance(size, int) else size.value()
        start = _now(x)
        codec.decode_flat(out[:nbytes], back, stream=stream)
        decode_s = min(decode_s, _now(x) - start)
    return nbytes, encode_s, decode_s


def normal(*sizes: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """[sizes] float32 from a standard normal distribution, by a generator of its own.

    Measurements may run beside a training. A number drawn from torch's generator there would change
    the dropout masks and the batches of the training.
    """
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*sizes, generator=generator, device=device)


def _now(x: torch.Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
