"""``fp8``: E4M3 elements, groups of 128 share a float32 scale (docs/format/fp8.md)."""

from __future__ import annotations

from cswap.codecs.lossy import LossyTiledCodec, fixed_rate
from cswap.codecs.traits import CodecRate, CodecTraits
from cswap_kernels.fp8 import fp8_decode_cpu, fp8_encode_cpu


class Fp8(LossyTiledCodec):
    """Error: 2**-4 of the value, or 2**-10 / 448 of the largest of its group if that is more."""

    name = "fp8"
    kernels = fp8_encode_cpu, fp8_decode_cpu
    traits = CodecTraits(
        predicted_ratio=fixed_rate(8 + 32 / 128),
        relative_error=0.026,
        rates={"cpu": CodecRate(14e9, 19e9), "cuda": CodecRate(1200e9, 1400e9)},
        rates_after_zvc={"cpu": CodecRate(11e9, 13e9), "cuda": CodecRate(750e9, 1000e9)},
    )
