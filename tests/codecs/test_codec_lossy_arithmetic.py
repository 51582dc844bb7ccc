"""Roundings, E4M3, E8M0 and casts are torch's; random numbers are Philox's, and unbiased."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import cswap
from cswap.codecs.base import EncodeKey
from cswap_kernels import floats, fp8, mxfp8, philox

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

KEY = EncodeKey(seed=0x123456789ABCDEF, tensor_id=7, step=11)
STREAM = 7 | 11 << 32


def encode_tile(encode: Callable[..., int], x: torch.Tensor) -> bytes:
    """Bytes of a float32 tile that is not stored raw."""
    dst = np.full(x.nbytes + 2048, 0xA5, np.uint8)
    n = encode(x.reshape(-1).numpy().view(np.uint32), dst, np.zeros(1, np.uint64), 0)
    assert n > 0
    return dst[:n].tobytes()


def test_widen_and_narrow_every_half() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    for kind, dtype in ((floats.IEEE, torch.float16), (floats.BFLOAT16, torch.bfloat16)):
        expected = torch.from_numpy(words.view(np.int16)).view(dtype).float()
        x = floats.widen(words, kind)
        finite = np.isfinite(expected.numpy())
        np.testing.assert_array_equal(np.isfinite(x), finite)
        np.testing.assert_array_equal(
            x[finite].view(np.uint32), expected.numpy()[finite].view("u4")
        )
        back = np.zeros_like(words)
        floats.narrow(x, back, kind)
        np.testing.assert_array_equal(back[finite], words[finite])


@pytest.mark.parametrize(("kind", "expected"), [(floats.IEEE, 0x7E00), (floats.BFLOAT16, 0x7FC0)])
def test_every_nan_becomes_one_nan_in_words_of_two_bytes(kind: int, expected: int) -> None:
    bits = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    words = np.zeros(bits.size, np.uint16)
    floats.narrow(bits.view(np.float32), words, kind)
    assert words.tolist() == [expected] * bits.size
    again = floats.narrow_reference(bits.view(np.float32), np.uint16, kind)
    assert again.tolist() == [expected] * bits.size


def near_ties(n_bits: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """float32 of all exponents around the ties of a format without the last n_bits."""
    tie = rng.integers(0, 2**32, 200_000, np.uint64).astype(np.uint32) >> n_bits << n_bits
    offset = rng.integers(-1, 2, tie.size).astype(np.uint32)
    x = (tie + np.uint32(1 << (n_bits - 1)) + offset).view(np.float32)
    return x[np.isfinite(x)]


@pytest.mark.parametrize(
    ("dtype", "n_bits"), [(torch.float16, 13), (torch.bfloat16, 16), (torch.float8_e4m3fn, 20)]
)
def test_roundings_are_torchs(dtype: torch.dtype, n_bits: int) -> None:
    x = near_ties(n_bits, np.random.default_rng(3))
    denormal = (near_ties(20, np.random.default_rng(4)).view(np.uint32) % (1 << 27)).view(
        np.float32
    )
    x = np.concatenate((x, denormal * np.float32(2.0**100), x / np.float32(3)))
    if dtype is torch.float8_e4m3fn:
        x = x[np.abs(x) <= 448]
        found = np.array([fp8.to_e4m3(v) for v in x[:: x.size // 20_000]])
        x = x[:: x.size // 20_000]
        np.testing.assert_array_equal(found, fp8.to_e4m3_reference(x))
        expected = torch.from_numpy(x).to(dtype).view(torch.uint8).numpy()
    else:
        x = x[np.abs(x) < (65504 if dtype is torch.float16 else 3e38)]
        found = np.zeros(x.size, np.uint16)
        floats.narrow(x, found, int(dtype is torch.bfloat16))
        expected = torch.from_numpy(x).to(dtype).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(found, expected)


def test_fp8_codes_are_torchs_conversion_of_the_quotients() -> None:
    x = torch.randn(4096) * torch.exp2(torch.randint(-5, 5, (4096,)))
    data = encode_tile(fp8.fp8_encode_cpu, x)
    scales = torch.frombuffer(bytearray(data[:128]), dtype=torch.float32)
    assert torch.equal(scales, x.view(32, 128).abs().amax(1) / 448)
    codes = torch.frombuffer(bytearray(data[128:]), dtype=torch.float8_e4m3fn)
    expected = (x.view(32, 128) / scales[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8).reshape(-1))
    x_hat = cswap.get_codec("fp8").decode(cswap.get_codec("fp8").encode(x))
    assert torch.equal(x_hat, (expected.float() * scales[:, None]).reshape(-1))


def test_every_e4m3_code_decodes_as_torch_does() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    found = np.array([fp8.from_e4m3(c) for c in codes], np.float32)
    np.testing.assert_array_equal(
        found.view(np.uint32) & 0xFFC00000, expected.view("u4") & 0xFFC00000
    )
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(fp8.e4m3_table(), expected)


def test_mxfp8_scale_is_the_specifications() -> None:
    x = torch.randn(64, 32) * torch.exp2(torch.randint(-9, 9, (64, 1)))
    x[0] = 0
    data = encode_tile(mxfp8.mxfp8_encode_cpu, x)
    scales = torch.frombuffer(bytearray(data[:64]), dtype=torch.uint8)
    expected = torch.floor(torch.log2(x.abs().amax(1).double())) - 8 + 127
    assert scales[0] == 0
    assert torch.equal(scales[1:].double(), expected[1:])
    factor = scales.view(torch.float8_e8m0fnu).float()[:, None]
    quotients = (x / factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes = torch.frombuffer(bytearray(data[64:]), dtype=torch.uint8)
    assert torch.equal(codes[32:], quotients.view(torch.uint8).reshape(-1)[32:])
    found = cswap.get_codec("mxfp8").decode(cswap.get_codec("mxfp8").encode(x))
    assert torch.equal(
        found, quotients.float() * torch.where(scales == 0, 0, factor[:, 0])[:, None]
    )


@pytest.mark.parametrize("value", [0, 1, 119, 254, 255])
def test_every_mxfp8_scale_decodes_as_torch_does(value: int) -> None:
    expected = torch.tensor([value], dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    np.testing.assert_array_equal(np.float32(mxfp8.e8m0(np.uint8(value))), expected.numpy()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "to"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_cast_is_torchs_cast(name: str, to: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.randn(20_000, dtype=dtype) * torch.exp2(torch.randint(-30, 12, (20_000,)))
    x[::7] = 0
    codec = cswap.get_codec(name)
    encoding = codec.encode(x)
    assert encoding.ratio > 0.99 * dtype.itemsize / 2
    assert torch.equal(codec.decode(encoding), x.to(to).to(dtype))


@pytest.mark.parametrize(
    ("name", "bits", "kept"),
    [
        ("fp16", 0x477FEFFF, False),  # just below 65520
        ("fp16", 0x477FF000, True),
        ("fp16", 0xF0000000, True),
        ("bf16", 0x7F7F7FFF, False),  # just below what rounds to infinity
        ("bf16", 0xFF7F8000, True),
        ("bf16", 0xFF800000, True),
        ("fp16", 0x7FFFFFFF, True),  # a NaN that is all ones
        ("bf16", 0x7FFFFFFF, True),
    ],
)
def test_cast_keeps_a_tile_that_would_overflow(name: str, bits: int, kept: bool) -> None:
    words = np.random.default_rng(7).standard_normal(3 * 4096).astype(np.float32).view(np.uint32)
    words[5000] = bits
    x = torch.from_numpy(words.view(np.int32))
    codec = cswap.get_codec(name)
    x_hat = codec.decode(codec.encode(x.view(torch.float32)))
    parts = zip(x.split(4096), x_hat.view(torch.int32).split(4096), strict=True)
    assert [torch.equal(a, b) for a, b in parts] == [False, kept, False]
    assert torch.isfinite(x_hat[5000]) or kept


# Random numbers.


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # the known answers of Random123
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    found = philox.philox4x32(*(np.uint32(v) for v in (*counter, *key)))
    assert tuple(map(int, found)) == expected
    reference = philox.philox4x32_reference(np.array([counter], np.uint32), key)
    assert tuple(map(int, reference[0])) == expected


def test_fill_rows_is_its_reference() -> None:
    out = np.zeros(5 * philox.ROW, np.uint16)
    first_row = 2**28 - 2  # counters cross 2**32
    philox.fill_rows(out, first_row, np.uint64(KEY.seed), np.uint64(STREAM))
    index = first_row * philox.ROW + np.arange(out.size)
    np.testing.assert_array_equal(out, philox.random16_reference(index, KEY.seed, STREAM))


def test_int4_is_unbiased() -> None:
    draws = 10_000
    group = torch.randn(32, generator=torch.Generator().manual_seed(1)) + 0.3
    x = group.repeat(draws)
    codec = cswap.get_codec("int4")
    x_hat = codec.decode(codec.encode(x, key=KEY)).view(draws, 32).double()
    step = float((group.max() - group.min()) / 14)
    assert float((x_hat - group).abs().max()) > 0.9 * step  # it does round at random
    # A value moves by a step with probability f: the mean of 1e4 draws is off by step / 200 at most
    # with standard deviation; five of these are exceeded once in 1e6 values.
    assert float((x_hat.mean(0) - group).abs().max()) < 5 * step / 200


def test_int4_bytes_are_a_function_of_the_key() -> None:
    x = torch.randn(5000)
    codec = cswap.get_codec("int4")
    keys = [EncodeKey(), KEY, EncodeKey(seed=1), EncodeKey(tensor_id=1), EncodeKey(step=1)]
    payloads = [codec.encode(x, key=k).payload for k in keys]
    for (i, a), (j, b) in itertools.product(enumerate(payloads), enumerate(payloads)):
        assert torch.equal(a, b) == (i == j)
    assert torch.equal(
        codec.encode(x, key=EncodeKey(KEY.seed, KEY.tensor_id, KEY.step)).payload, payloads[1]
    )
    wrapped = EncodeKey(KEY.seed - 2**64, KEY.tensor_id + 2**32, KEY.step - 2**32)
    assert torch.equal(codec.encode(x, key=wrapped).payload, payloads[1])
