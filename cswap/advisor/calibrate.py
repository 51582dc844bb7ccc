"""Measures this machine's codecs and link: `cswap calibrate`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

import torch

from cswap.advisor import link
from cswap.advisor.calibration import Calibration, CodecTimes, machine_of, stored
from cswap.advisor.candidates import RAW, all_candidates, nvcomp_candidates
from cswap.advisor.fit import fit
from cswap.advisor.round_trip import round_trip
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec
from cswap.display import shown
from cswap.errors import CswapError, UnsupportedError
from cswap.log import log
from cswap.profiler import profile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cswap.codecs.base import Codec

SIZES: Final = {"cpu": (1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 20, 1 << 24, 1 << 26)}
"""Bytes of the measured tensors, by kind of device: the usual range of a swap."""

ZEROS: Final = (0.0, 0.5, 0.9)
"""Zero fractions of the measured tensors."""

ROUNDS: Final = 5
"""Measurements per tensor, of which the median counts."""

LINK: Final = "link"
"""Name of the last step of a calibration."""


def steps(kind: str) -> Iterator[str]:
    """Calibrate step by step; the measurements are saved after the last step.

    Yields:
        Name of each codec once it is measured; at last `LINK`.

    Args:
        kind: kind of device; "cpu" or "cuda".

    Raises:
        UnsupportedError: there is no such device here.
    """
    _check(kind)
    times: dict[str, CodecTimes] = {}
    left_out: dict[str, str] = {}
    for name in _names(kind):
        try:
            times[name] = measure(name, kind)
        except (ValueError, RuntimeError, CswapError) as error:
            log.warning("%s was not calibrated (%s); its default rates are used.", name, error)
            left_out[name] = str(error)
        yield name
    found, raw = None, times.get(RAW)
    try:
        if kind == "cuda":
            found = link.measure_link()
        elif raw is not None:
            found = link.link_of_cpu(raw)
    except (RuntimeError, CswapError) as error:
        log.warning("The link could not be measured (%s); defaults are used.", error)
    before = stored(kind)
    shapes = {} if before is None else before.shapes
    Calibration(machine_of(kind), times, found, left_out, shapes).save()
    yield LINK


def n_steps(kind: str) -> int:
    """Number of steps of a calibration of that kind of device."""
    return len(_names(kind)) + 1


def _names(kind: str) -> tuple[str, ...]:
    return (*all_candidates(), *nvcomp_candidates(kind))


def measure(name: str, kind: str) -> CodecTimes:
    """Measure the times of a codec on this machine, in a few tenths of a second.

    Args:
        name: name of the codec.
        kind: kind of device.

    Raises:
        UnsupportedError: there is no such device here, or the codec takes no tensors on it.
        ValueError: the measured times are impossible.
    """
    _check(kind)
    codec = get_codec(name)
    tensors = list(_tensors(codec, kind))
    profiles = [profile(x.cpu()) for x in tensors]
    for x in tensors:
        round_trip(codec, x, repeat=1)  # compiles the kernels
    encode: list[list[float]] = [[] for _ in tensors]
    decode: list[list[float]] = [[] for _ in tensors]
    for _ in range(ROUNDS):
        for i, x in enumerate(tensors):  # in turns: a disturbance then hits all tensors alike
            _, encode_s, decode_s = round_trip(codec, x, repeat=1)
            encode[i].append(encode_s)
            decode[i].append(decode_s)
    return CodecTimes(
        fit(profiles, [statistics.median(s) for s in encode]),
        fit(profiles, [statistics.median(s) for s in decode]),
    )


def _check(kind: str) -> None:
    if kind not in SIZES or (kind == "cuda" and not torch.cuda.is_available()):
        raise UnsupportedError(f"device={shown(kind)}: not here; known are {', '.join(SIZES)}.")


def _tensors(codec: Codec, kind: str) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = next((d for d in (torch.float32, torch.int64) if takes(codec, d, kind)), None)
    if dtype is None:
        raise UnsupportedError(f"it takes neither float32 nor int64 on {kind}")
    for nbytes in SIZES[kind]:
        for zeros in ZEROS:
            if dtype is torch.float32:
                x = torch.randn(nbytes // 4, generator=generator)
            else:
                x = torch.randint(1, 1000, (nbytes // 8,), generator=generator)
            yield (x * (torch.rand(x.shape, generator=generator) >= zeros)).to(kind)
