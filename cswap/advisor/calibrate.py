"""Measures this machine's codecs and link: `cswap calibrate`, and once in the background."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from cswap.advisor import link
from cswap.advisor.calibration import Calibration, CodecTimes, machine_of, stored
from cswap.advisor.fit import fit
from cswap.advisor.rates import RATES
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
"""Bytes of the tensors measured, by kind of device: a swap's usual range."""

ZEROS: Final = (0.0, 0.5, 0.9)

ROUNDS: Final = 5

ATTEMPTS: Final = 3
"""At a codec whose times cannot be."""

CODECS: Final = tuple(name for name in RATES["cpu"][0] if name != "keep")
"""Every codec that the advisor considers."""

LINK: Final = "link"
"""Name of the last step of a calibration."""


def steps(kind: str, *, again: bool = False) -> Iterator[str]:
    """Calibrate step by step; each is kept as soon as it is done, so a run may be interrupted.

    Yields:
        What was measured: a codec's name, then `LINK`.

    Args:
        kind: of device; "cpu" or "cuda".
        again: measure also what an earlier run has measured.

    Raises:
        UnsupportedError: there is no such device here.
    """
    _check(kind)
    found = None if again else stored(kind, partial=True)
    if found is None or found.complete:
        found = Calibration(machine_of(kind), {}, complete=False)
    for name in CODECS:
        if name not in found.times and name not in found.left_out:
            found = _with_codec(found, name, kind)
            found.save()
        yield name
    try:
        found = replace(found, link=link.measure_link(kind))
    except (RuntimeError, CswapError) as error:
        log.warning("The link could not be measured (%s); defaults are used.", error)
    replace(found, complete=True).save()
    yield LINK


def n_steps() -> int:
    """Steps of a whole calibration."""
    return len(CODECS) + 1


def _with_codec(found: Calibration, name: str, kind: str) -> Calibration:
    try:
        return replace(found, times={**found.times, name: measure(name, kind)})
    except (ValueError, RuntimeError, CswapError) as error:
        log.warning("%s was not calibrated (%s); its default rates are used.", name, error)
        return replace(found, left_out={**found.left_out, name: str(error)})


def measure(name: str, kind: str) -> CodecTimes:
    """How long a codec takes here, by a few tenths of a second of measuring.

    Args:
        name: of the codec.
        kind: of device.

    Raises:
        UnsupportedError: there is no such device here.
        ValueError: what was measured cannot be, also when it was measured again.
    """
    _check(kind)
    codec = get_codec(name)
    tensors = list(_tensors(codec, kind))
    profiles = [profile(x.cpu()) for x in tensors]
    for x in tensors:
        round_trip(codec, x, repeat=1)  # compiles
    encode: list[list[float]] = [[] for _ in tensors]
    decode: list[list[float]] = [[] for _ in tensors]
    for _ in range(ROUNDS):
        for i, x in enumerate(tensors):  # A B A B: what disturbs one round disturbs all alike
            encode_s, decode_s = _once(codec, x)
            encode[i].append(encode_s)
            decode[i].append(decode_s)
    scratch = codec.bound(tensors[-1].dtype, tensors[-1].numel()) / tensors[-1].nbytes
    return CodecTimes(
        fit(profiles, [statistics.median(s) for s in encode]),
        fit(profiles, [statistics.median(s) for s in decode]),
        scratch,
    )


def _check(kind: str) -> None:
    if kind not in SIZES or (kind == "cuda" and not torch.cuda.is_available()):
        raise UnsupportedError(f"device={shown(kind)}: not here; known are {', '.join(SIZES)}.")


def _once(codec: Codec, x: torch.Tensor) -> tuple[float, float]:
    for _ in range(ATTEMPTS):
        _, encode_s, decode_s = round_trip(codec, x, repeat=1)
        if all(math.isfinite(s) and 0 < s < 60 for s in (encode_s, decode_s)):
            return encode_s, decode_s
    raise ValueError(f"its times cannot be: {encode_s}, {decode_s} s")


def _tensors(codec: Codec, kind: str) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for nbytes in SIZES[kind]:
        for zeros in ZEROS:
            if takes(codec, torch.float32, kind):
                x = torch.randn(nbytes // 4, generator=generator)
            else:
                x = torch.randint(1, 1000, (nbytes // 8,), generator=generator)
            yield (x * (torch.rand(x.shape, generator=generator) >= zeros)).to(kind)
