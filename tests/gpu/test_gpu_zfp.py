"""``zfp`` on a GPU against the repository's reference: needs no zfpy."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from cswap.codecs import gpu
from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.layout import words_of
from cswap.codecs.registry import get_codec
from cswap.errors import CorruptEncodingError
from cswap_kernels.floats import BFLOAT16, IEEE, narrow_reference, widen_reference
from cswap_kernels.zfp import SMALLEST, block_bits, zfp_decode_reference, zfp_encode_reference

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def values_of(n, dtype, seed=0):
    """Noise, smooth, sparse, zero and tiny blocks, and of many magnitudes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g, dtype=torch.float64)
    block = torch.arange(n) // 4 % 6
    x = torch.where(block == 1, 1 + 1e-3 * torch.sin(0.1 * torch.arange(n)), x)
    x = torch.where(block == 2, x * (torch.rand(n, generator=g) < 0.3), x)
    x = torch.where(block == 3, torch.zeros(n, dtype=torch.float64), x)
    x = torch.where(block == 4, x * 2.0 ** torch.randint(-12, 12, (n,), generator=g), x)
    x = torch.where(block == 5, x * 2.0**-96, x)
    return x.to(dtype)


def expect(x, rate):
    """(payload, words that come back)."""
    words, kind = words_of(x), BFLOAT16 if x.dtype == torch.bfloat16 else IEEE
    itemsize = max(words.itemsize, 4)
    bits = block_bits(rate, itemsize)
    wide: Any = words.view(np.float64) if words.itemsize == 8 else widen_reference(words, kind)
    wide = np.where(np.abs(wide) < SMALLEST[itemsize], 0, wide).astype(wide.dtype)
    stream = zfp_encode_reference(wide, bits)
    if len(stream) >= words.nbytes:  # stored raw
        return struct.pack("<IIQ", 1, bits, words.size) + words.tobytes(), words
    x_hat = zfp_decode_reference(stream, wide.dtype, wide.size, bits)
    if words.itemsize == 2:
        words_hat = narrow_reference(x_hat, np.uint16, kind)
    else:
        words_hat = x_hat.view(words.dtype)
    return struct.pack("<IIQ", 0, bits, words.size) + stream, words_hat


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [1, 2, 5, 8, 15, 16, 31, 63])
def test_as_the_reference(device, dtype, rate):
    if rate >= 8 * dtype.itemsize:
        pytest.skip("no stream would be shorter than the words")
    codec: Any = get_codec(f"zfp:{rate}")
    for n in (9, 128, 1031, 2050):
        x = values_of(n + 1, dtype, n)
        for start in (0, 1):  # the second is not aligned
            payload, words_hat = expect(x[start : start + n].clone(), rate)
            there = codec.encode(x.to(device)[start : start + n])
            assert there.payload.cpu().numpy().tobytes() == payload
            assert np.array_equal(words_of(codec.decode(there).cpu()), words_hat)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_that_zfp_cannot_take_keeps_all(device, dtype):
    codec: Any = get_codec("zfp:8")
    for n, at in ((1, 0), (5, 4), (1 << 20, 777_777)):
        x = torch.randn(n, device=device).to(dtype)
        x[at] = float("nan")
        for _ in range(2):  # the second finds the control words as the first has left them
            encoding = codec.encode(x)
            assert encoding.nbytes == 16 + x.nbytes
            assert bool((encoding.payload[16:] == x.view(torch.uint8)).all())
            assert bool((codec.decode(encoding).view(torch.uint8) == x.view(torch.uint8)).all())


def test_large_and_into_pinned_memory(device):
    codec: Any = get_codec("zfp")
    x = torch.randn((1 << 22) + 3, device=device)
    out = torch.empty(codec.bound(x.dtype, x.numel()), dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.current_stream()
    size = codec.encode_flat(x, out, key=DEFAULT_KEY, stream=stream)
    stream.synchronize()
    here = codec.encode(x)
    nbytes = size if isinstance(size, int) else size.value()
    assert torch.equal(out[:nbytes], here.payload.cpu())
    assert float((codec.decode(here) - x).abs().max()) < 2.0**-8


def test_damage_is_reported(device):
    codec: Any = get_codec("zfp:12")
    payload = codec.encode(torch.randn(4096, device=device)).payload
    out = torch.empty(4096, device=device)
    for bad in (payload[:-1], payload[:16], payload[:0], torch.cat((payload, payload))):
        with pytest.raises(CorruptEncodingError, match="damaged"):
            codec.decode_flat(bad, out, stream=None)
    payload[4] ^= 4
    stream = torch.cuda.current_stream()
    codec.decode_flat(payload, out, stream=stream)
    stream.synchronize()
    assert list(gpu.damage(device.index))[-1:] == [0]
