"""``zvc+X``: zeros are left out, the codec X encodes the rest (docs/format/compose.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.codecs.tiled import TiledCodec
from cswap.codecs.traits import CodecRate, CodecTraits, word_bits
from cswap_kernels.zvc_plus import zvc_plus_decode_cpu, zvc_plus_encode_cpu

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import Codec, EncodeKey
    from cswap.codecs.tiled import TileFunctions
    from cswap.schema.tensor import DType, TensorProfile

FIRST: Final = "zvc"
"""The only codec that may come first: it leaves survivors that a second codec can encode."""

SURVIVING: Final = 0.5
"""Share of words that are assumed not to be zero where the rate of a composition is derived."""

SCATTERED: Final = 0.05
"""Error of the fraction of equal neighbours in a sample, up to which zeros may lie anywhere."""


class ZvcPlus(TiledCodec):
    """Zeros come back exactly, also with a lossy X. The codec is lossless if X is lossless.

    Args:
        zvc: the codec ``zvc``, whose rates count for the composition.
        second: X. Where X would not shrink the survivors of a tile, they are stored verbatim.
    """

    kernels = zvc_plus_encode_cpu, zvc_plus_decode_cpu

    def __init__(self, zvc: Codec, second: TiledCodec) -> None:
        self.name = f"{FIRST}+{second.name}"
        self.lossless = second.lossless
        self.traits = composed_traits(zvc.traits, second.traits)
        self._second = second
        # Machine code that the kernels call by address; it must live as long as this codec.
        self._held: dict[str, TileFunctions] = {}

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """The dtypes of X."""
        return self._second.supports(dtype) and self.runs_on(device, dtype)

    def cuda_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """The arguments of X."""
        return self._second.cuda_args(dtype, key)

    @property
    def cuda_format(self) -> str:
        """Name of the composition without the parameters of X."""
        return f"{FIRST}+{self._second.cuda_format}"

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[2 + k] u64: addresses of X's two tile functions, then the k arguments of X."""
        x = self._held.setdefault(dtype.name, self._second.tile_functions(dtype))
        addresses = [x.encode.address, x.decode.address]
        own = self._second.tile_args(dtype, key)
        return np.concatenate((np.array(addresses, np.uint64), own))


def why_not_composed(first: Codec, second: Codec) -> str | None:
    """The reason why a codec ``first+second`` does not exist; None if it exists."""
    if first.name != FIRST:
        return f"{first.name!r} leaves nothing to a second codec; only {FIRST!r} does"
    if not isinstance(second, TiledCodec):
        return f"{second.name!r} does not encode by tiles"
    if not second.traits.after_zvc:
        return f"{second.name!r} looks for zeros, of which {FIRST!r} leaves none"
    return None


def composed_traits(zvc: CodecTraits, second: CodecTraits) -> CodecTraits:
    """Traits of ``zvc+X`` from those of ``zvc`` and of X."""
    predicted = second.predicted_ratio
    kinds = {*second.rates_after_zvc, *(zvc.rates.keys() & second.rates.keys())}
    return CodecTraits(
        predicted_ratio=None if predicted is None else _ratio_after_zvc(predicted),
        relative_error=second.relative_error,
        milder=second.milder,
        rates={
            kind: second.rates_after_zvc.get(kind) or _in_turn(zvc.rates[kind], second.rates[kind])
            for kind in kinds
        },
        after_zvc=False,
    )


def _in_turn(zvc: CodecRate, second: CodecRate) -> CodecRate:
    # zvc reads every word, then X reads the survivors.
    return CodecRate(
        1 / (1 / zvc.encode_bytes_per_s + SURVIVING / second.encode_bytes_per_s),
        1 / (1 / zvc.decode_bytes_per_s + SURVIVING / second.decode_bytes_per_s),
        max(zvc.overhead_s, second.overhead_s),
    )


def _ratio_after_zvc(
    predicted: Callable[[TensorProfile], float],
) -> Callable[[TensorProfile], float]:
    def ratio(profile: TensorProfile) -> float:
        word = word_bits(profile)
        bitmap = 1.0 if profile.zero_fraction else 0.0  # bits per word; none without zeros
        of_survivors = max(1.0, predicted(survivors(profile)))  # else they are stored verbatim
        return word / (bitmap + (1 - profile.zero_fraction) * word / of_survivors)

    return ratio


def survivors(profile: TensorProfile) -> TensorProfile:
    """Profile of the nonzero words, derived from the profile of all words.

    Fractions become shares of the survivors. Repeated words count as zeros as far as the number of
    zeros allows. Where all nonzero words may be the same, as those of dropout's noise are, and
    as many neighbours are the same as if the zeros lay anywhere (``z² + (1 - z)²``), they are.

    >>> from cswap.schema.tensor import TensorProfile
    >>> found = survivors(TensorProfile("float32", 1000, 64, zero_fraction=0.75))
    >>> found.nbytes, found.zero_fraction
    (250, 0.0)
    """
    zeros = profile.zero_fraction
    left = max(1 - zeros, 1e-9)
    repeats = _share(profile.repeat_fraction - zeros, left)
    scattered = abs(profile.repeat_fraction - zeros**2 - left**2) < SCATTERED
    if profile.dtype == "bool" or (profile.spread_nonzero[:1] == (1.0,) and scattered):
        repeats = _share(profile.repeat_fraction - zeros**2, left**2)
    return replace(
        profile,
        nbytes=round(profile.nbytes * (1 - zeros)),
        zero_fraction=0.0,
        repeat_fraction=repeats,
        spread=profile.spread_nonzero,
        zero_exponent=_share(profile.zero_exponent - zeros, left),
    )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part) / whole)
