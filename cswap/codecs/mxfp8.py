"""``mxfp8``: OCP's MXFP8, E4M3 elements, groups of 32 (docs/format/mxfp8.md)."""

from __future__ import annotations

from cswap.codecs.lossy import LossyTiledCodec, fixed_rate
from cswap.codecs.traits import CodecRate, CodecTraits
from cswap_kernels.mxfp8 import mxfp8_decode_cpu, mxfp8_encode_cpu


class Mxfp8(LossyTiledCodec):
    """Error: 2**-4 of the value (2**-3 if it saturates), or 2**-18 of the largest of its group."""

    name = "mxfp8"
    kernels = mxfp8_encode_cpu, mxfp8_decode_cpu
    traits = CodecTraits(
        predicted_ratio=fixed_rate(8 + 8 / 32),
        relative_error=0.029,
        rates={"cpu": CodecRate(14e9, 13e9), "cuda": CodecRate(1300e9, 1400e9)},
    )
