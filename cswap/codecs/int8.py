"""``int8``: groups of 128 share a scale and a zero point (docs/format/int8.md)."""

from __future__ import annotations

from cswap.codecs.lossy import LossyTiledCodec, fixed_rate
from cswap.codecs.traits import CodecRate, CodecTraits
from cswap_kernels.int8 import int8_decode_cpu, int8_encode_cpu


class Int8(LossyTiledCodec):
    """Error: half the step of the group, (max - min) / 510, where 0 counts as one of its values.

    A nonzero value below half a step becomes a whole step, if its sign has codes.
    """

    name = "int8"
    kernels = int8_encode_cpu, int8_decode_cpu
    traits = CodecTraits(
        predicted_ratio=fixed_rate(8 + 32 / 128),
        relative_error=0.0061,
        rates={"cpu": CodecRate(19e9, 20e9), "cuda": CodecRate(1300e9, 1400e9)},
        rates_after_zvc={"cpu": CodecRate(14e9, 14e9), "cuda": CodecRate(770e9, 1000e9)},
    )
