"""The codecs that ``codec="auto"`` considers, by their own traits (`CodecTraits`).

A codec of another package is a candidate like a built-in one, as soon as its traits predict its
ratio.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from cswap.advisor.rates import UNKNOWN_RATES
from cswap.codecs import nvcomp_library
from cswap.codecs.nvcomp_traits import TRAITS
from cswap.codecs.registry import compositions, get_codec, installed_codecs
from cswap.codecs.tolerance import COARSE, FINE, needed_tolerance
from cswap.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cswap.codecs.base import Codec
    from cswap.codecs.traits import CodecRate
    from cswap.schema.tensor import TensorProfile

    FallBack = Callable[[str, object, str], None]
    """Counts and logs a failure, its reason, and the way taken instead."""

RAW: Final = "raw"
"""Always a candidate where a tensor may not stay: the codec that does nothing."""

FIXED_RATE: Final = "zfp"
"""Lossy codec whose rate only ``policy="cswap+"`` chooses: ``lossy="zfp"`` names no candidate."""

HALF: Final = "fp16"
"""Codec for tensors that forgive a small error."""

HALF_LEAST: Final = 2.0**-6
"""Largest magnitude that a tensor of tolerance FINE must have. A float16 keeps 11 bits down to
2**-14."""

_warned: set[str] = set()


def lossless_candidates() -> tuple[str, ...]:
    """Names of the lossless codecs whose ratio can be predicted, and their compositions."""
    return _with_compositions(
        c for c in installed_codecs() if c.lossless and _is_predicted(c) and c.name != RAW
    )


def nvcomp_candidates(kind: str) -> tuple[str, ...]:
    """Names of nvCOMP's codecs on that kind of device; none where it is missing or does not work.

    It is loaded for a GPU alone, and only where it is installed.
    """
    usable = kind == "cuda" and nvcomp_library.is_installed() and not nvcomp_library.failure()
    return tuple(TRAITS) if usable else ()


def lossy_candidates(lossy: str | float) -> tuple[str, ...]:
    """Names of the lossy codecs that the option ``lossy`` admits, and their compositions.

    Args:
        lossy: "off"; the name of a codec; or the largest relative error.
    """
    if lossy in ("off", FIXED_RATE):
        return ()
    if isinstance(lossy, str):
        return _with_compositions([get_codec(lossy)])
    return _with_compositions(c for c in _lossy_codecs() if relative_error(c) <= lossy)


def lossy_by_tolerance(lossy: str | float) -> dict[int, tuple[str, ...]]:
    """The lossy candidates of a tensor by its tolerance (`cswap.codecs.tolerance`).

    `HALF` is one of a tensor that forgives little, where the option admits a codec with as large an
    error, or a larger one.

    Args:
        lossy: see `lossy_candidates`. All codecs are imported to be asked.
    """
    coarse = lossy_candidates(lossy)
    if not coarse:
        return {}
    fine = [name for name in coarse if needed_tolerance(get_codec(name)) <= FINE]
    most = relative_error(get_codec(lossy)) if isinstance(lossy, str) else lossy
    half = lossy_candidates(HALF) if relative_error(get_codec(HALF)) <= most else ()
    return {COARSE: coarse, FINE: tuple(dict.fromkeys((*fine, *half)))}


def all_candidates() -> tuple[str, ...]:
    """Every codec that the advisor may choose under some value of ``lossy``: raw comes first.

    Those of nvCOMP are left out (`nvcomp_candidates`).
    """
    return (RAW, *lossless_candidates(), *_with_compositions(_lossy_codecs()))


def lossy_names() -> tuple[str, ...]:
    """Names that the option ``lossy`` takes."""
    return ("off", *(codec.name for codec in _lossy_codecs()), FIXED_RATE)


def foretold_ratio(codec: Codec, profile: TensorProfile) -> float | None:
    """The ratio that the codec predicts, at least 1.0; None if it predicts none.

    A prediction that raises, or that is not a positive number, counts as none, with one warning.
    """
    predict = codec.traits.predicted_ratio
    if predict is None:
        return None
    ratio, found = 0.0, ""
    try:
        ratio = float(predict(profile))
        found = f"{ratio:g}"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if 0 < ratio < math.inf:
        return max(1.0, ratio)
    if codec.name not in _warned:
        _warned.add(codec.name)
        log.warning(
            "codec %r predicts no usable ratio (%s): it is not considered.", codec.name, found
        )
    return None


def predicted_ratio(name: str, profile: TensorProfile) -> float:
    """The ratio that the codec of that name predicts; 1.0 if it predicts none."""
    return foretold_ratio(get_codec(name), profile) or 1.0


def default_rate(codec: Codec, kind: str) -> CodecRate:
    """Speed of the codec on this kind of device until the machine is calibrated."""
    return codec.traits.rates.get(kind) or UNKNOWN_RATES[kind]


def _lossy_codecs() -> list[Codec]:
    return [c for c in installed_codecs() if not c.lossless and _is_predicted(c)]


def _with_compositions(codecs: Iterable[Codec]) -> tuple[str, ...]:
    found = list(codecs)
    return (*(codec.name for codec in found), *compositions(found))


def _is_predicted(codec: Codec) -> bool:
    return codec.traits.predicted_ratio is not None


def relative_error(codec: Codec) -> float:
    """The codec's relative error, as it says; infinite if it says none, also of a lossless one."""
    error = codec.traits.relative_error
    return math.inf if error is None else error
