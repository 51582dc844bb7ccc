"""zvc, csr, rle, zvc+X: bytes as documented, kernels as references, hostile bytes refused."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit

from cswap.codecs.base import EncodeKey
from cswap.codecs.compose import composed_traits, survivors
from cswap.codecs.registry import compositions, get_codec, installed_codecs
from cswap.codecs.traits import CodecRate, CodecTraits
from cswap.errors import ConfigError, CorruptEncodingError
from cswap.profiler import profile
from cswap.schema.tensor import DTYPES, TensorProfile
from cswap.testing import check_codec
from cswap_kernels.rle import rle_decode_reference, rle_encode_reference
from cswap_kernels.tiles import ENTRY, RAW, SLACK, TILE_WORDS, count_tiles, directory_bytes
from cswap_kernels.zvc_plus import zvc_plus_decode_reference, zvc_plus_encode_reference

# By name, for mypy takes a kernel's arguments for those of its code generator.
simd, words = (import_module(f"cswap_kernels.{name}") for name in ("simd", "words"))

ROOT = Path(__file__).resolve().parents[2]
FORMATS = ("zvc", "csr", "rle")
WORDS = (1, 2, 4, 8)
QUICK_WORDS = [pytest.param(w, marks=() if w == 4 else pytest.mark.slow) for w in WORDS]
"""Kernels that Python calls are compiled for each word size."""

NO_ARGS = np.zeros(1, np.uint64)
COMPOSITIONS = compositions(installed_codecs())


def kernels(name):
    """(encode_cpu, decode_cpu, encode_reference, decode_reference) of a format."""
    module = import_module(f"cswap_kernels.{name}")
    kinds = ("encode_cpu", "decode_cpu", "encode_reference", "decode_reference")
    return tuple(getattr(module, f"{name}_{kind}") for kind in kinds)


def sizes(word):
    tile = TILE_WORDS[word]
    return (1, 63, 64, 65, 257, 1000, tile - 1, tile)


def inputs(word, n, seed=0):
    """Words of every kind that a sparse format treats on its own."""
    rng = np.random.default_rng(seed)
    unsigned = np.dtype(f"u{word}")
    dense = rng.integers(1, 2 ** (8 * word) - 1, n, unsigned, endpoint=True)
    yield np.zeros(n, unsigned)
    yield dense
    yield np.full(n, dense[0])
    yield np.repeat(dense, 37)[:n]
    yield np.repeat(dense, 200)[:n]
    yield np.where(rng.random(n) < 0.3, unsigned.type(1 << (8 * word - 1)), unsigned.type(0))
    for zeros in (0.02, 0.3, 0.65, 0.97):
        yield np.where(rng.random(n) < zeros, unsigned.type(0), dense)
    alone = np.zeros(n, unsigned)
    alone[-1] = 1
    yield alone


def encode(function, x, args=NO_ARGS):
    """The segment that an encode_tile makes, or None; guards what it may not write."""
    dst = np.full(x.nbytes + SLACK + 64, 0xA5, np.uint8)
    nbytes = function(x, dst[: x.nbytes + SLACK], args, 0)
    assert (dst[x.nbytes + SLACK :] == 0xA5).all()
    return dst[:nbytes].tobytes() if 0 <= nbytes < x.nbytes else None


def decode(function, segment, n, word, args=NO_ARGS):
    """The words that a decode_tile makes of a segment, or None if it is refused."""
    src = np.full(len(segment) + 64, 0xFF, np.uint8)
    src[: len(segment)] = np.frombuffer(segment, np.uint8)
    out = np.full(n + 128, 0xA5, f"u{word}")
    refused = function(src[: len(segment)], out[64 : 64 + n], args, 0) != 0
    assert (out[:64] == 0xA5).all()
    assert (out[64 + n :] == 0xA5).all()
    return None if refused else out[64 : 64 + n]


def decode_reference(function, segment, n, word):
    like = np.full(n, 0xA5, f"u{word}")
    try:
        function(segment, like)
    except ValueError:
        return None
    return like


def segments(payload, numel, word):
    """The segments of a payload; None for raw ones."""
    data = payload.numpy()
    directory = data[: ENTRY * count_tiles(numel, word)].view(np.uint32).reshape(-1, 2)
    return [
        None if nbytes & RAW else data[16 * int(start) : 16 * int(start) + int(nbytes)].tobytes()
        for start, nbytes in directory
    ]


def example(page, name):
    """The bytes of an example in docs/format, checked against the positions written there."""
    text = (ROOT / "docs" / "format" / f"{page}.md").read_text("utf-8")
    block = re.search(rf"<!-- example: {re.escape(name)} -->\n```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    found = b""
    for line in block[1].splitlines():
        at, digits = re.match(r" *(\d+)  ((?:[0-9a-f]{2}(?: |$))+)", line).groups()  # type: ignore[union-attr]
        assert int(at) == len(found), line
        found += bytes.fromhex(digits)
    return found


def nearly_empty(n, values):
    return torch.zeros(n).index_put_((torch.tensor([*values]),), torch.tensor([*values.values()]))


TWELVE = nearly_empty(12, {1: 1.0, 3: -0.0, 10: 0.5})
EXAMPLES = {
    ("zvc", "zvc"): TWELVE,
    ("csr", "csr"): nearly_empty(300, {2: 1.0, 255: -2.0, 256: 0.5}),
    ("rle", "rle"): torch.tensor([1] * 100 + [2] * 100 + [0] * 56, dtype=torch.int16),
    ("compose", "zvc+rle"): torch.tensor([0, 0, 5, 5] * 10 + [5] * 60, dtype=torch.int32),
    ("compose", "zvc+int8"): TWELVE,
}


@pytest.mark.parametrize(("page", "name"), EXAMPLES)
def test_worked_examples(page, name):
    x = EXAMPLES[page, name]
    encoding = get_codec(name).encode(x)
    assert segments(encoding.payload, x.numel(), x.itemsize) == [example(page, name)]
    y = get_codec(name).decode(encoding)
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("word", QUICK_WORDS)
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_and_reference_write_the_same_bytes(name, word):
    encode_cpu, decode_cpu, encode_slowly, decode_slowly = kernels(name)
    for n in sizes(word):
        for x in inputs(word, n):
            segment = encode(encode_cpu, x)
            assert segment == encode_slowly(x)
            if segment is not None:
                assert np.array_equal(decode(decode_cpu, segment, n, word), x)
                assert np.array_equal(decode_reference(decode_slowly, segment, n, word), x)


def damaged(segment, rng):
    """Every truncation, every single-bit flip, random bytes."""
    for end in range(len(segment)):
        yield segment[:end]
    yield segment + b"\0"
    for bit in range(8 * len(segment)):
        flipped = bytearray(segment)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    for size in (1, 8, 16, 24, 40, len(segment)) * 5:
        yield rng.bytes(size)


@pytest.mark.parametrize("word", QUICK_WORDS)
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_and_reference_refuse_the_same_bytes(name, word):
    encode_cpu, decode_cpu, _, decode_slowly = kernels(name)
    rng = np.random.default_rng(word)
    n_refused = n_taken = 0
    for n, zeros in ((70, 0.8), (300, 0.97)):
        x = np.where(rng.random(n) < zeros, 0, rng.integers(1, 100, n)).astype(f"u{word}")
        segment = encode(encode_cpu, x)
        assert segment is not None
        for bad in damaged(segment, rng):
            found = decode(decode_cpu, bad, n, word)
            expected = decode_reference(decode_slowly, bad, n, word)
            assert (found is None) == (expected is None), bad.hex()
            assert found is None or np.array_equal(found, expected), bad.hex()
            n_refused += found is None
            n_taken += found is not None
    assert n_refused > 250
    assert n_taken > 50  # flips of values, which are for the stream's checksum to find


@njit
def by_vectors_and_loops(x, i, mask, dst, back):
    # Both ways side by side: at 64 and 1024 of dst, in the halves of back [128, 2].
    word = words.word_bytes(x)
    ends = (
        simd.compress(x, i, mask, dst, 64) - 64,
        words.compress_loop(x, i, 64, mask, dst, 1024) - 1024,
        simd.compress_lanes(mask, 64, dst, 2048) - 2048,
        words.lanes_loop(mask, 64, dst, 2240) - 2240,
    )
    src = dst[: 64 + ends[0]]
    if ends[0] > 0:
        simd.expand(src, 64, mask, back[0], 0)
        words.expand_loop(src, 64, mask, back[0], 64, 64)
        simd.spread(src, 64 - word, mask, back[1], 0)
        words.spread_loop(src, 64 - word, mask, back[1], 64, 64)
    nonzero = simd.nonzero_mask(x, i), words.nonzero_loop(x, i, 64)
    return ends, nonzero, (simd.change_mask(x, i), words.change_loop(x, i, 64))


# A loop over all primitives takes a second to compile per word size; the formats' own tests run the
# primitives in every size.
@pytest.mark.parametrize("word", QUICK_WORDS)
def test_vectors_and_loops_agree(word):
    rng = np.random.default_rng(word)
    for _ in range(100):
        x = rng.integers(0, 3, 300).astype(f"u{word}") * np.dtype(f"u{word}").type(77)
        mask = rng.integers(0, 2**64, dtype=np.uint64)
        mask &= rng.choice(np.array([2**64 - 1, 2**63 + 1, 0xFFFF, 1, 0], np.uint64))
        mask |= rng.choice(np.array([0, 2**64 - 1, 2**32], np.uint64))
        dst = np.full(2600, 7, np.uint8)
        back = np.full((2, 128), 9, x.dtype)
        args = (x, int(rng.integers(1, 236)), mask, dst, back)
        ends, nonzero, changes = by_vectors_and_loops(*args)
        assert ends[0] == ends[1] == word * ends[2] == word * ends[3] == word * mask.bit_count()
        assert np.array_equal(dst[64 : 64 + ends[0]], dst[1024 : 1024 + ends[1]])
        assert np.array_equal(dst[2048 : 2048 + ends[2]], dst[2240 : 2240 + ends[3]])
        assert np.array_equal(back[:, :64], back[:, 64:])
        assert nonzero[0] == nonzero[1]
        assert changes[0] == changes[1]


def digest(word, formats):
    """Of all segments of some formats, with what they decode to checked."""
    found = hashlib.sha256()
    for name in formats:
        encode_cpu, decode_cpu, _, _ = kernels(name)
        for n in (65, 1000, TILE_WORDS[word]):
            for x in inputs(word, n):
                segment = encode(encode_cpu, x)
                found.update(b"raw" if segment is None else segment)
                if segment is not None:
                    assert np.array_equal(decode(decode_cpu, segment, n, word), x)
    return found.hexdigest()


@pytest.mark.slow  # by default, vectors and loops are compared in one process
@pytest.mark.parametrize("formats", [["zvc"], FORMATS])
def test_cpu_without_vectors_writes_the_same_bytes(formats):
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('sparse', sys.argv[1])\n"
        "tests = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(tests)\n"
        "print(tests.digest(2, sys.argv[2:]))\n"
    )
    # Numba keeps what it compiled for either CPU: the second run of this test is fast.
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", code, __file__, *formats],
        env={**os.environ, **generic, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == digest(2, formats), done.stderr


@pytest.mark.parametrize("name", [*FORMATS, "zvc+int8"])
def test_zeros_cost_nothing_but_the_directory(name):
    x = torch.zeros(3 * TILE_WORDS[4] + 17)
    encoding = get_codec(name).encode(x)
    assert encoding.nbytes == directory_bytes(4) == 32
    assert torch.equal(get_codec(name).decode(encoding), x)


@pytest.mark.parametrize("name", FORMATS)
def test_every_dtype_and_every_bit(name):
    codec = get_codec(name)
    bits = np.array([0, 1, 0x80, 0x7F, 0xFF], np.uint8)
    for d in DTYPES.values():
        dtype = getattr(torch, d.name)
        assert codec.supports(dtype)
        assert not codec.supports(dtype, "cuda")
        # Words like -0.0, denormals, and NaNs of any payload, between zeros.
        raw = np.random.default_rng(7).choice(bits, 40 * d.itemsize)
        raw = raw % 2 if d.kind == "bool" else raw
        raw = np.concatenate((raw, np.zeros(200 * d.itemsize, np.uint8), raw))
        x = torch.from_numpy(raw.copy()).view(dtype)
        encoding = codec.encode(x)
        assert encoding.nbytes < encoding.raw_nbytes
        assert torch.equal(codec.decode(encoding).view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_take_what_their_second_codec_takes(name):
    codec, second = get_codec(name), get_codec(name[4:])
    assert codec.name == name
    assert codec.lossless == second.lossless
    for dtype in DTYPES:
        assert codec.supports(getattr(torch, dtype)) == second.supports(getattr(torch, dtype))


@pytest.mark.parametrize("name", ["zvc+bitpack", "zvc+int4"])
def test_compositions_keep_the_contract(name, shortened):
    shortened()
    check_codec(get_codec(name), examples=2)  # others: test_codec_contract.py


def test_composition_and_reference_write_the_same_bytes():
    codec = get_codec("zvc+rle")
    for word in WORDS:
        for n in sizes(word):
            for x in inputs(word, n):
                (segment,) = segments(codec.encode(torch.from_numpy(x.copy())).payload, n, word)
                assert segment == zvc_plus_encode_reference(x, rle_encode_reference)
                if segment is not None:
                    y = np.full_like(x, 0xA5)
                    zvc_plus_decode_reference(segment, y, rle_decode_reference)
                    assert np.array_equal(x, y)


@pytest.mark.parametrize(("zeros", "flags"), [(0.5, 1), (0.97, 3)])
def test_composition_and_reference_refuse_the_same_bytes(zeros, flags):
    # 0.5: survivors through rle. 0.97: too few for that, stored as they are.
    codec, rng = get_codec("zvc+rle"), np.random.default_rng(3)
    x = np.where(rng.random(150) < zeros, 0, 5).astype(np.uint32)
    encoding = codec.encode(torch.from_numpy(x.view(np.int32)))
    (segment,) = segments(encoding.payload, x.size, 4)
    assert segment is not None
    assert segment[-1] == flags
    n_refused = 0
    for bad in damaged(segment, rng):
        head = np.array([1, len(bad), 0, 0], np.uint32).tobytes()
        payload = torch.frombuffer(bytearray(head + bad), dtype=torch.uint8)
        out = torch.full((x.size,), -1, dtype=torch.int32)
        expected = np.full_like(x, 0xA5)
        try:
            zvc_plus_decode_reference(bad, expected, rle_decode_reference)
        except ValueError:
            n_refused += 1
            with pytest.raises(CorruptEncodingError, match="tile 0 is damaged"):
                codec.decode_flat(payload, out, stream=None)
        else:
            codec.decode_flat(payload, out, stream=None)
            assert np.array_equal(out.numpy().view(np.uint32), expected)
    assert n_refused > 200


@pytest.mark.parametrize("second", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("zeros", [0.01, 0.3, 0.9])
def test_zeros_stay_zero_and_survivors_are_what_the_second_codec_makes_of_them(second, zeros):
    key = EncodeKey(3, 4, 5)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TILE_WORDS[4], generator=generator)
    x[torch.rand(x.shape, generator=generator) < zeros] = 0
    survivors = x[x != 0]
    codec, alone = get_codec(f"zvc+{second}"), get_codec(second)
    encoding = codec.encode(x, key=key)
    y = codec.decode(encoding)
    assert torch.equal(y[x != 0], alone.decode(alone.encode(survivors, key=key)))
    assert not y[x == 0].view(torch.int32).any()
    (segment,) = segments(encoding.payload, x.numel(), 4)
    (inner,) = segments(alone.encode(survivors, key=key).payload, survivors.numel(), 4)
    assert segment is not None
    assert inner is not None
    assert segment[512:] == inner + b"\1"


def test_tiles_without_zeros_are_the_second_codec_s_whatever_their_place():
    # int4 rounds by the place of a word in the tensor: every tile must be told its own.
    key = EncodeKey(1, 2, 3)
    x = torch.linspace(0.5, 1, TILE_WORDS[4]).repeat(3)
    both = [get_codec(name).encode(x, key=key) for name in ("zvc+int4", "int4")]
    composed, alone = (segments(e.payload, x.numel(), 4) for e in both)
    assert len(set(alone)) == 3
    assert composed == [None if s is None else s + b"\0" for s in alone]


def test_the_rate_of_a_composition_is_that_of_its_parts_one_after_the_other():
    rates = [{"cpu": CodecRate(100.0, 200.0, overhead)} for overhead in (3.0, 2.0)]
    composed = composed_traits(*(CodecTraits(rates=each) for each in rates))
    assert composed.rates == {"cpu": CodecRate(1 / 0.015, 1 / 0.0075, 3.0)}  # X has half the words


@pytest.mark.parametrize(
    ("zeros", "alone", "ratio"),
    [(0.5, 2.0, 32 / (1 + 0.5 * 32 / 2)), (0.0, 2.0, 2.0), (0.5, 0.5, 32 / (1 + 0.5 * 32))],
)
def test_the_predicted_ratio_of_a_composition(zeros, alone, ratio):
    composed = composed_traits(CodecTraits(), CodecTraits(predicted_ratio=lambda _: alone))
    given = TensorProfile("float32", 1000, 64, zero_fraction=zeros)
    assert composed.predicted_ratio is not None
    assert composed.predicted_ratio(given) == ratio


def test_fractions_of_a_profile_become_shares_of_the_survivors():
    given = TensorProfile(
        "float32", 1000, 64, zero_fraction=0.5, repeat_fraction=0.75, zero_exponent=0.625
    )
    found = survivors(given)
    assert (found.nbytes, found.zero_fraction) == (500, 0.0)
    assert (found.repeat_fraction, found.zero_exponent) == (0.5, 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_the_ratio_of_dropouts_noise_is_foreseen(share, dtype):
    torch.manual_seed(0)
    noise = torch.empty(1 << 18).bernoulli_(1 - share).div_(1 - share).to(dtype)
    codec, alone = get_codec("zvc+rle"), get_codec("rle")
    assert codec.traits.predicted_ratio is not None
    predicted = codec.traits.predicted_ratio(profile(noise))
    actual = noise.nbytes / codec.encode(noise).payload.nbytes
    assert 0.6 * actual < predicted < 1.15 * actual
    assert actual > 1.5 * noise.nbytes / alone.encode(noise).payload.nbytes


@pytest.mark.parametrize("zeros", [0.1, 0.5, 0.9])
def test_repeats_of_zeros_are_none_of_the_survivors(zeros):
    x = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0))
    x[: int(zeros * x.numel())] = 0.0  # in a row
    assert survivors(profile(x)).repeat_fraction < 0.01
    x = x[torch.randperm(x.numel())]
    assert survivors(profile(x)).repeat_fraction < 0.01


def test_survivors_that_the_second_codec_refuses_are_stored_as_they_are():
    x = torch.zeros(1000)
    x[::3] = torch.randn(334)
    x[30] = float("nan")
    encoding = get_codec("zvc+int8").encode(x)
    (segment,) = segments(encoding.payload, 1000, 4)
    assert segment is not None
    assert segment[128:] == x[x != 0].numpy().tobytes() + b"\3"
    y = get_codec("zvc+int8").decode(encoding)
    assert torch.equal(y.view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("int8+zvc", "'int8' leaves nothing to a second codec; only 'zvc' does"),
        ("rle+zvc", "'rle' leaves nothing to a second codec; only 'zvc' does"),
        ("zvc+zvc", "'zvc' looks for zeros, of which 'zvc' leaves none"),
        ("zvc+csr", "'csr' looks for zeros, of which 'zvc' leaves none"),
        ("zvc+zvc+int8", "'zvc+int8' looks for zeros, of which 'zvc' leaves none"),
        ("zvc+raw", "'raw' does not encode by tiles"),
    ],
)
def test_what_cannot_be_composed_says_what_can(name, reason):
    with pytest.raises(ConfigError) as error:
        get_codec(name)
    known = ", ".join(COMPOSITIONS)
    assert str(error.value) == f"codec={name!r}: {reason}. Use one of {known}."
