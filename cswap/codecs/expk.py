"""``expk``: exponents in 3 or 4 bits, sign and mantissa verbatim (docs/format/expk.md)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.codecs.tiled import TiledCodec
from cswap.codecs.traits import CodecRate, CodecTraits, word_bits
from cswap.errors import ConfigError
from cswap.schema.tensor import DTYPES, dtype_name
from cswap_kernels.expk import expk_decode_cpu, expk_encode_cpu

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType, TensorProfile


_WITHIN: Final = {3: 2, 4: 3}
"""Index into `TensorProfile.spread` of the exponents that a code of k bits reaches."""

_RATES: Final = {"cpu": CodecRate(10e9, 8e9), "cuda": CodecRate(870e9, 980e9)}
_RATES_AFTER_ZVC: Final = {"cpu": CodecRate(12e9, 11e9), "cuda": CodecRate(560e9, 770e9)}


def _predicted_ratio(k: int, profile: TensorProfile) -> float:
    # Sign and mantissa verbatim, a code of k bits for the exponent, 24 bits for an exponent out of
    # reach. Words of exponent 0 (zeros, denormals) have a code, too.
    if not profile.spread:
        return 1.0
    word, exponent = word_bits(profile), DTYPES[profile.dtype].exponent_bits
    zeros = max(profile.zero_fraction, profile.zero_exponent)
    codes = [
        bits + 24 * max(0.0, 1 - profile.spread[index] - zeros)
        for bits, index in _WITHIN.items()
        if k in (0, bits)
    ]
    return word / min(word, word - exponent + min(codes))


class Expk(TiledCodec):
    """Exponents as distances from the tile's largest; ``expk:3`` and ``expk:4`` fix the bits."""

    lossless = True
    kernels = expk_encode_cpu, expk_decode_cpu

    def __init__(self, k: int = 0) -> None:
        """Args: k: bits of a code, 3 or 4; 0 takes the smaller encoding per tile.

        Raises:
            ConfigError: k has another value.
        """
        if k not in (0, 3, 4):
            raise ConfigError(f"codec='expk:{k}': k must be 3 or 4; leave it out for the cheaper.")
        self.name = f"expk:{k}" if k else "expk"
        self.traits = CodecTraits(
            partial(_predicted_ratio, k), rates=_RATES, rates_after_zvc=_RATES_AFTER_ZVC
        )
        self._k = k

    @property
    def cuda_format(self) -> str:
        """The same twin for every parameter."""
        return "expk"

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Floats and complex numbers of words of 2 bytes and more."""
        d = DTYPES.get(dtype_name(dtype))
        takes = d is not None and d.kind == "float" and d.word > 1
        return takes and self.runs_on(device, dtype)

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[3] u64: exponent bits, mantissa bits, k."""
        return np.array([dtype.exponent_bits, dtype.mantissa_bits, self._k], np.uint64)
