"""``zvc+X``: the CUDA twins against the CPU twins, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from cswap_kernels.bitpack import bitpack_decode_cpu, bitpack_encode_cpu
from cswap_kernels.cast import cast_decode_cpu, cast_encode_cpu
from cswap_kernels.cuda import zvc_plus
from cswap_kernels.expk import expk_decode_cpu, expk_encode_cpu
from cswap_kernels.floats import BFLOAT16, IEEE
from cswap_kernels.fp8 import fp8_decode_cpu, fp8_encode_cpu
from cswap_kernels.int4 import int4_decode_cpu, int4_encode_cpu
from cswap_kernels.int8 import int8_decode_cpu, int8_encode_cpu
from cswap_kernels.mxfp8 import mxfp8_decode_cpu, mxfp8_encode_cpu
from cswap_kernels.rle import rle_decode_cpu, rle_encode_cpu
from cswap_kernels.tile_calls import tile_decoder, tile_encoder
from cswap_kernels.zvc_plus import ADDRESSES, zvc_plus_decode_cpu, zvc_plus_encode_cpu

INNER = {
    "bitpack": (zvc_plus.zvc_bitpack_tile, bitpack_encode_cpu, bitpack_decode_cpu, (0,)),
    "cast": (zvc_plus.zvc_cast_tile, cast_encode_cpu, cast_decode_cpu, (IEEE, BFLOAT16)),
    "expk": (zvc_plus.zvc_expk_tile, expk_encode_cpu, expk_decode_cpu, (8, 23, 0)),
    "fp8": (zvc_plus.zvc_fp8_tile, fp8_encode_cpu, fp8_decode_cpu, (IEEE,)),
    "int8": (zvc_plus.zvc_int8_tile, int8_encode_cpu, int8_decode_cpu, (IEEE,)),
    "int4": (zvc_plus.zvc_int4_tile, int4_encode_cpu, int4_decode_cpu, (IEEE, 99, 1 << 40)),
    "rle": (zvc_plus.zvc_rle_tile, rle_encode_cpu, rle_decode_cpu, (0,)),
    "mxfp8": (zvc_plus.zvc_mxfp8_tile, mxfp8_encode_cpu, mxfp8_decode_cpu, (IEEE,)),
}


class Composed:
    """`Twins` of a composition on u32: the CPU's arguments begin with two addresses."""

    def __init__(self, twins, name, **options):
        maker, encode, decode, self.args = INNER[name]
        self.held = tile_encoder(encode, 4), tile_decoder(decode, 4)
        addresses = [f.address for f in self.held]
        assert len(addresses) == ADDRESSES
        self.twins = twins(maker, zvc_plus_encode_cpu, zvc_plus_decode_cpu, 4, **options)
        self.on_cpu = (*addresses, *self.args)
        encode_cpu, decode_cpu = self.twins.encode_cpu, self.twins.decode_cpu
        self.twins.encode_cpu = lambda words, _=(): encode_cpu(words, self.on_cpu)
        self.twins.decode_cpu = lambda payload, n, _=(): decode_cpu(payload, n, self.on_cpu)


def sparse(n, zeros, name, seed=0):
    rng = np.random.default_rng(seed)
    if name == "bitpack":
        values = rng.integers(1, 500, n).astype(np.uint32)
    else:
        values = (rng.normal(size=n).astype(np.float32) + np.float32(3)).view(np.uint32)
    return values * (rng.random(n) >= zeros).astype(np.uint32)


@pytest.fixture(params=INNER)
def name(request):
    return request.param


@pytest.mark.parametrize("zeros", [0.0, 0.6, 0.97, 1.0])
def test_twins_agree(twins, name, zeros):
    pair = Composed(twins, name, tile=256)
    words = sparse(600, zeros, name)
    lossless = name in ("bitpack", "expk", "rle")
    pair.twins.agree(words, args=pair.args, expected=words if lossless else None)


def test_survivors_that_do_not_shrink_are_verbatim(twins, name):
    pair = Composed(twins, name, tile=256, threads=64)
    rng = np.random.default_rng(3)
    words = rng.integers(0x7F800001, 1 << 32, 256, dtype=np.uint64).astype(np.uint32)
    words *= (rng.random(256) >= 0.5).astype(np.uint32)  # NaNs and the like: every X gives up
    pair.twins.agree(words, args=pair.args, expected=words, aligned=0)


def test_hostile(twins, name):
    pair = Composed(twins, name, tile=256)
    words = sparse(256, 0.5, name)
    good = pair.twins.encode_cpu(words)
    rng = np.random.default_rng(5)
    for place in [*rng.integers(0, good.size * 8, 12).tolist(), good.size * 8 - 1]:
        bad = good.copy()
        bad[place >> 3] ^= 1 << (place & 7)
        expected, first = pair.twins.decode_cpu(bad, 256)
        back, status = pair.twins.decode(bad, 256, pair.args)
        assert (first == -1) == (status == 0)
        if first == -1:
            assert np.array_equal(back, expected)
