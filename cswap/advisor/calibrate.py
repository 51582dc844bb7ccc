"""Measures this machine's codecs: `cswap calibrate`."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final

import torch

from cswap.advisor.calibration import CodecTimes
from cswap.advisor.fit import fit
from cswap.advisor.rates import CPU_RATES
from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.registry import get_codec
from cswap.devices.cpu import CpuStream
from cswap.errors import UnsupportedError
from cswap.profiler import profile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cswap.advisor.fit import TimeModel
    from cswap.codecs.base import Codec
    from cswap.schema.tensor import TensorProfile

SIZES: Final = (1 << 18, 1 << 20, 1 << 22)
"""Bytes of the tensors measured: a worker's usual range."""

ZEROS: Final = (0.0, 0.5, 0.9)

ROUNDS: Final = 5

ONE_THREAD: Final = CpuStream(1)


CODECS: Final = tuple(name for name in CPU_RATES if name != "keep")
"""Every codec that the advisor considers."""


def measure(name: str, kind: str) -> CodecTimes:
    """How long a codec takes here, by a few tenths of a second of measuring.

    Args:
        name: of the codec.
        kind: of device; "cpu".

    Raises:
        UnsupportedError: another kind of device.
    """
    if kind != "cpu":
        raise UnsupportedError(f"device={kind!r}: only 'cpu' can be calibrated so far.")
    codec = get_codec(name)
    tensors = list(_tensors(codec))
    profiles = [profile(x) for x in tensors]
    encode: list[list[float]] = [[] for _ in tensors]
    decode: list[list[float]] = [[] for _ in tensors]
    for count in range(ROUNDS + 1):
        for i, x in enumerate(tensors):  # A B A B: what disturbs one round disturbs all alike
            encode_s, decode_s = _once(codec, x)
            if count:  # the first compiles
                encode[i].append(encode_s)
                decode[i].append(decode_s)
    return CodecTimes(_fit(profiles, encode), _fit(profiles, decode))


def _fit(profiles: list[TensorProfile], seconds: list[list[float]]) -> TimeModel:
    return fit(profiles, [statistics.median(s) for s in seconds])


def _once(codec: Codec, x: torch.Tensor) -> tuple[float, float]:
    out = torch.empty(codec.bound(x.dtype, x.numel()), dtype=torch.uint8)
    result = torch.empty_like(x)
    for memory in (out, result):
        memory.zero_()  # the pages of pooled memory are there already, so these must be, too
    start = time.perf_counter()
    size = codec.encode_flat(x, out, key=DEFAULT_KEY, stream=ONE_THREAD)
    encoded = time.perf_counter()
    payload = out[: size if isinstance(size, int) else size.value()]
    middle = time.perf_counter()
    codec.decode_flat(payload, result, stream=ONE_THREAD)
    return encoded - start, time.perf_counter() - middle


def _tensors(codec: Codec) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for nbytes in SIZES:
        for zeros in ZEROS:
            if codec.supports(torch.float32):
                x = torch.randn(nbytes // 4, generator=generator)
            else:
                x = torch.randint(1, 1000, (nbytes // 8,), generator=generator)
            yield x * (torch.rand(x.shape, generator=generator) >= zeros)
