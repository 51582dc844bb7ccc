"""bitpack and expk: kernels against references, formats as written down, hostile bytes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cswap.codecs.registry import get_codec
from cswap.errors import ConfigError, CorruptEncodingError
from cswap.schema.tensor import DTYPES
from cswap_kernels import bitpack, expk
from cswap_kernels.tiles import SLACK, TILE_WORDS

ROOT = Path(__file__).resolve().parents[2]
SIZES = [1, 2, 7, 63, 64, 65, 127, 128, 129, 1000]
FLOATS = {
    "float16": (5, 10, 2),
    "bfloat16": (8, 7, 2),
    "float32": (8, 23, 4),
    "float64": (11, 52, 8),
}
QUICK = {"float16", "bfloat16", 8}
"""Kernels that Python calls are compiled for each word size. Quick tests use expk's for 2 bytes
and bitpack's for 8."""


def quickly(*cases):
    """Parameters, slow unless the first of a case is one of `QUICK`."""
    return [
        pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in cases
    ]


def encode_tile(kernel, words, args):
    out = np.full(words.nbytes + SLACK, 0xA5, np.uint8)
    nbytes = kernel(words, out, np.array(args, np.uint64), 0)
    return None if nbytes < 0 else out[:nbytes]


def decode_tile(kernel, stream, words, args):
    words[:] = ~words.dtype.type(0)
    return kernel(stream, words, np.array(args, np.uint64), 0)


def float_words(name, n, seed, kind):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator)
    if kind == "zeros":
        x[torch.rand(n, generator=generator) < 0.5] = 0
    if kind == "spread":
        x *= torch.exp(8 * torch.randn(n, generator=generator))
    if kind == "tiny":
        x *= 2.0**-130 if name != "float16" else 2.0**-20
    if kind == "special":
        values = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40]
        x[: min(n, 6)] = torch.tensor(values[: min(n, 6)])
    if kind == "payload":  # NaN with any payload, infinities, and the largest finite numbers
        exponent_bits, mantissa_bits, word = FLOATS[name]
        rng = np.random.default_rng(seed)
        bits = rng.integers(0, 1 << 64, n, dtype=np.uint64) >> np.uint64(64 - 8 * word)
        most = np.uint64((1 << exponent_bits) - 2 << mantissa_bits)
        return (bits | most).astype(f"u{word}")
    word = FLOATS[name][2]
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    return x.to(getattr(torch, name)).view(whole).numpy().view(f"u{word}").copy()


@pytest.mark.sampled
@pytest.mark.parametrize("name", quickly(*((name,) for name in FLOATS)))
@pytest.mark.parametrize("kind", ["normal", "zeros", "spread", "tiny", "special", "payload"])
@pytest.mark.parametrize("k", [0, 3, 4])
def test_expk_kernel_writes_what_the_reference_writes(name, kind, k):
    exponent_bits, mantissa_bits, word = FLOATS[name]
    args = [exponent_bits, mantissa_bits, k]
    for n in SIZES:
        words = float_words(name, n, n, kind)
        expected = expk.expk_encode_reference(words, exponent_bits, mantissa_bits, k)
        stream = encode_tile(expk.expk_encode_cpu, words, args)
        assert (None if stream is None else stream.tobytes()) == expected
        if stream is not None:
            back = np.empty(n, f"u{word}")
            assert decode_tile(expk.expk_decode_cpu, stream, back, args) == 0
            assert np.array_equal(back, words)
            back[:] = 0
            expk.expk_decode_reference(stream.tobytes(), back, exponent_bits, mantissa_bits)
            assert np.array_equal(back, words)


WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 31, 32, 33, 63, 64)
FITTING = [(word, width) for word in (1, 2, 4, 8) for width in WIDTHS if width <= 8 * word]


@pytest.mark.parametrize(("word", "width"), quickly(*FITTING))
@pytest.mark.parametrize("signed", [False, True])
def test_bitpack_kernel_writes_what_the_reference_writes(word, signed, width):
    flip = 1 << (8 * word - 1) if signed else 0
    rng = np.random.default_rng(width)
    for n in SIZES:
        base = int(rng.integers(0, (1 << 8 * word) - (1 << width) + 1, dtype=np.uint64))
        drawn = [base + int(rng.integers(0, 2**63)) % (1 << width) for _ in range(n)]
        words = np.array([(v ^ flip) & (1 << 8 * word) - 1 for v in drawn], np.uint64).astype(
            f"u{word}"
        )
        expected = bitpack.bitpack_encode_reference(words, flip)
        stream = encode_tile(bitpack.bitpack_encode_cpu, words, [flip])
        assert (None if stream is None else stream.tobytes()) == expected
        if stream is not None:
            back = np.empty(n, f"u{word}")
            assert decode_tile(bitpack.bitpack_decode_cpu, stream, back, [flip]) == 0
            assert np.array_equal(back, words)
            slow = bitpack.bitpack_decode_reference(stream.tobytes(), n, word, flip)
            assert np.array_equal(slow, words)


@pytest.mark.parametrize("n", [64, 127, 8192])
@pytest.mark.parametrize("values", ["both", "zeros", "ones"])
def test_bools_take_one_bit_or_none(n, values):
    x = torch.zeros(n, dtype=torch.bool)
    x[: {"both": n // 3, "zeros": 0, "ones": n}[values]] = True
    encoding = get_codec("bitpack").encode(x)
    row = -(-(-(-n // 64) * 8) // 16) * 16
    assert encoding.nbytes == 16 + bitpack.HEADER + (row if values == "both" else 0)
    assert torch.equal(get_codec("bitpack").decode(encoding), x)


def test_a_bool_that_is_neither_0_nor_1_survives():
    x = torch.tensor([0, 1, 2, 255] * 40, dtype=torch.uint8).view(torch.bool)
    back = get_codec("bitpack").decode(get_codec("bitpack").encode(x))
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


def example(name):
    """The bytes of the worked example in docs/format, positions checked."""
    text = (ROOT / "docs" / "format" / f"{name}.md").read_text()
    block = re.search(rf"<!-- example: {name} -->\n```\n(.*?)```", text, re.DOTALL)
    found = b""
    assert block is not None
    for line in block[1].splitlines():
        matched = re.match(r" *(\d+)  ((?:[0-9a-f]{2} ?)+)", line)
        assert matched is not None
        position, data = matched.groups()
        assert int(position) == len(found)
        found += bytes.fromhex(data)
    return found


def test_worked_example_of_bitpack():
    words = np.array([5, -2, 5, 0] + [3] * 20, np.int64).view(np.uint64)
    stream = encode_tile(bitpack.bitpack_encode_cpu, words, [1 << 63])
    assert stream.tobytes() == example("bitpack")


def test_worked_example_of_expk():
    x = torch.tensor([1, -2, 3, 0.5] + [1.5] * 58 + [0, 2.0**-20], dtype=torch.bfloat16)
    words = x.view(torch.int16).numpy().view(np.uint16)
    assert encode_tile(expk.expk_encode_cpu, words, [8, 7, 0]).tobytes() == example("expk")


def damaged(stream):
    """Every truncation, every flip of a bit, and random bytes; whether to ask the reference."""
    rng = np.random.default_rng(0)
    for n in range(len(stream)):
        yield stream[:n].copy(), True
    for bit in range(8 * len(stream)):
        flipped = stream.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        # It is slow: the header, what may be a list of escapes, and some bits of the rest.
        yield flipped, bit < 128 or bit >= 8 * len(stream) - 128 or bit % 13 == 0
    yield np.append(stream, stream), True
    for n in rng.integers(0, 2 * len(stream), 200):
        yield rng.integers(0, 256, int(n), dtype=np.uint8), True


def decode_among(fill, stream, kernel, words, args):
    """Decode a stream that lies among other bytes into words that lie among others."""
    source = np.full(len(stream) + 512, fill, np.uint8)
    source[256:-256] = stream
    target = np.full(words.nbytes + 256, 0xA5, np.uint8)
    inner = target[128:-128].view(words.dtype)
    result = kernel(source[256:-256], inner, np.array(args, np.uint64), 0)
    assert (target[:128] == 0xA5).all()
    assert (target[-128:] == 0xA5).all()
    return inner.copy() if result == 0 else None


def accepted(stream, kernel, reference, words, args):
    """Whether a stream is; what lies around it does not matter, and the reference agrees."""
    found = decode_among(0x00, stream, kernel, words, args)
    other = decode_among(0xFF, stream, kernel, words, args)
    assert (found is None) == (other is None)
    assert found is None or np.array_equal(found, other)
    if reference is not None:
        try:
            expected = reference(stream.tobytes())
        except ValueError:
            expected = None
        assert (found is None) == (expected is None)
        assert found is None or np.array_equal(found, expected)
    return found is not None


@pytest.mark.sampled
@pytest.mark.parametrize("name", quickly(*((name,) for name in FLOATS)))
@pytest.mark.parametrize("k", [3, 4])
def test_expk_kernel_and_reference_agree_on_damaged_bytes(name, k):
    exponent_bits, mantissa_bits, word = FLOATS[name]
    args = [exponent_bits, mantissa_bits, k]
    # float16 in codes of 4 bits saves a bit per word: no padding, and few escapes
    n = 320 if name == "float16" else 200
    x = torch.rand(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    x[0], x[5], x[50], x[-1] = -4, 2.0**-14, 2.0**-13, 0
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    tile = x.to(getattr(torch, name)).view(whole).numpy().view(f"u{word}")
    stream = encode_tile(expk.expk_encode_cpu, tile, args)
    assert int(stream[4:8].view(np.uint32)[0]) >= 2

    def reference(data):
        like = np.zeros_like(tile)
        expk.expk_decode_reference(data, like, exponent_bits, mantissa_bits)
        return like

    found = [
        accepted(s, expk.expk_decode_cpu, reference if asked else None, tile, args)
        for s, asked in damaged(stream)
    ]
    assert not any(found[: len(stream)])  # the truncations


@pytest.mark.parametrize(
    ("word", "width"), quickly((1, 1), (1, 5), (2, 9), (4, 7), (8, 0), (8, 13))
)
@pytest.mark.parametrize("signed", [False, True])
def test_bitpack_kernel_and_reference_agree_on_damaged_bytes(word, width, signed):
    flip = 1 << (8 * word - 1) if signed else 0
    values = np.random.default_rng(2).integers(0, 1 << width, 150)
    values[:2] = 0, (1 << width) - 1
    words = values.astype(f"u{word}") ^ np.array(flip, np.uint64).astype(f"u{word}")
    stream = encode_tile(bitpack.bitpack_encode_cpu, words, [flip])
    assert int(stream[0]) == width

    def reference(data):
        return bitpack.bitpack_decode_reference(data, words.size, word, flip)

    found = [
        accepted(s, bitpack.bitpack_decode_cpu, reference if asked else None, words, [flip])
        for s, asked in damaged(stream)
    ]
    assert not any(found[: len(stream)])  # the truncations


@pytest.mark.parametrize("word", [1, *(pytest.param(w, marks=pytest.mark.slow) for w in (2, 4))])
def test_a_width_beyond_the_word_is_refused_whatever_the_length(word):
    width = 8 * word + 1
    stream = np.zeros(bitpack.HEADER + word * 64 + 16, np.uint8)  # 64 words of that width
    stream[0] = width
    words = np.zeros(64, f"u{word}")
    assert decode_among(0, stream, bitpack.bitpack_decode_cpu, words, [0]) is None
    with pytest.raises(ValueError, match="width"):
        bitpack.bitpack_decode_reference(stream.tobytes(), 64, word, 0)


@pytest.fixture
def escaping():
    """500 float32 of which words 10, 20 and 30 are escaped, encoded; the positions begin at -9."""
    x = torch.ones(500)
    x[10], x[20], x[30] = 1e-30, 1e-20, 1e-10
    words = x.view(torch.int32).numpy().view(np.uint32)
    stream = encode_tile(expk.expk_encode_cpu, words, [8, 23, 3])
    assert stream[-9:-3].view(np.uint16).tolist() == [10, 20, 30]
    return stream, words


def decode_both(stream, words):
    """What kernel and reference, which agree, make of a stream of `escaping`."""
    like = np.zeros_like(words)

    def reference(data):
        expk.expk_decode_reference(data, like, 8, 23)
        return like

    taken = accepted(stream, expk.expk_decode_cpu, reference, words, [8, 23, 3])
    return like if taken else None


@pytest.mark.parametrize("positions", [(20, 10, 30), (10, 10, 30), (10, 20, 31), (10, 20, 65535)])
def test_positions_must_be_those_of_the_escapes_in_order(escaping, positions):
    stream, words = escaping
    assert np.array_equal(decode_both(stream, words), words)
    stream[-9:-3] = np.array(positions, np.uint16).view(np.uint8)
    assert decode_both(stream, words) is None


def test_fields_behind_the_last_word_are_not_looked_at(escaping):
    stream, words = escaping
    twos, third_bits = stream[-201:-73], stream[-73:-9]
    twos[116:] |= 0xC0  # words 500 to 511
    third_bits[62] |= 0xF0
    third_bits[63] = 0xFF
    assert np.array_equal(decode_both(stream, words), words)


def test_an_escape_that_names_a_word_without_one_is_corrupt():
    x = torch.tensor([1.0] * 200 + [1e-30], dtype=torch.float32)
    encoding = get_codec("expk").encode(x)
    payload = encoding.payload.clone()
    assert int(payload[20]) == 1  # one escape, whose position is in the last three bytes
    size = int(payload[4:8].view(torch.int32)[0])
    payload[16 + size - 3] ^= 1
    with pytest.raises(CorruptEncodingError, match="damaged"):
        get_codec("expk").decode(type(encoding)("expk", encoding.meta, payload))


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("bfloat16", 1.30, 1.40), ("float32", 1.13, 1.17)]
)
def test_ratio_of_normal_values(dtype, low, high):
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    assert low < get_codec("expk").encode(x).ratio < high


def test_indices_of_pooling_and_tokens_shrink():
    x = torch.randn(64, 64, 16, 16, generator=torch.Generator().manual_seed(0))
    indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)[1]
    tokens = torch.randint(0, 256, (1 << 16,), generator=torch.Generator().manual_seed(0))
    assert get_codec("bitpack").encode(indices).ratio >= 6
    assert get_codec("bitpack").encode(tokens).ratio >= 7.5


def test_what_is_taken_and_what_is_not():
    takes = {
        n for n in DTYPES if hasattr(torch, n) and get_codec("expk").supports(getattr(torch, n))
    }
    assert takes == {*FLOATS, "complex32", "complex64", "complex128"}
    assert not get_codec("bitpack").supports(torch.float32)
    assert not get_codec("bitpack").supports(torch.int32, "cuda")
    with pytest.raises(ConfigError, match="k must be 3 or 4"):
        get_codec("expk:5")


def test_a_tile_fits_the_position_of_an_escape():
    assert max(TILE_WORDS.values()) <= 1 << 16
