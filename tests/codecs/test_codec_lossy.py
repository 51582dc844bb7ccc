"""The lossy codecs: contract, bytes, error bounds, the random numbers, and hostile tiles."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import cswap
from cswap.codecs.base import EncodeKey
from cswap.errors import ConfigError
from cswap_kernels import cast, floats, fp8, int4, int8, mxfp8, philox

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

DOCS = Path(__file__).parents[2] / "docs" / "format"
KEY = EncodeKey(seed=0x123456789ABCDEF, tensor_id=7, step=11)
STREAM = 7 | 11 << 32


@dataclass(frozen=True)
class Format:
    """A tiled format: both halves, their references, and args of the kernels after the first."""

    encode: Callable[..., int]
    decode: Callable[..., int]
    encode_reference: Callable[[NDArray[np.float32]], bytes | None]
    decode_reference: Callable[[bytes, int], NDArray[np.float32]]
    args: tuple[int, ...] = ()
    words: tuple[tuple[int, int], ...] = ((4, 0), (2, 0), (2, 1), (8, 0))  # bytes, kind

    def encode_tile(self, words: NDArray[Any], kind: int, first: int = 0) -> bytes | None:
        """Bytes of a tile by the kernel; None for raw."""
        dst = np.full(words.nbytes + 2048, 0xA5, np.uint8)
        nbytes = self.encode(words, dst, np.array([kind, *self.args], np.uint64), first)
        return None if nbytes < 0 else dst[:nbytes].tobytes()

    def decode_tile(self, data: bytes, words: NDArray[Any], kind: int) -> int:
        """Decode into words by the kernel."""
        src = np.frombuffer(bytearray(data), np.uint8)
        return self.decode(src, words, np.array([kind, *self.args], np.uint64), 0)


FORMATS = {
    "int8": Format(
        int8.int8_encode_cpu,
        int8.int8_decode_cpu,
        int8.int8_encode_reference,
        int8.int8_decode_reference,
    ),
    "fp8": Format(
        fp8.fp8_encode_cpu,
        fp8.fp8_decode_cpu,
        fp8.fp8_encode_reference,
        fp8.fp8_decode_reference,
    ),
    "mxfp8": Format(
        mxfp8.mxfp8_encode_cpu,
        mxfp8.mxfp8_decode_cpu,
        mxfp8.mxfp8_encode_reference,
        mxfp8.mxfp8_decode_reference,
    ),
    "int4": Format(
        int4.int4_encode_cpu,
        int4.int4_decode_cpu,
        lambda x: int4.int4_encode_reference(x, KEY.seed, STREAM, 0),
        int4.int4_decode_reference,
        args=(KEY.seed, STREAM),
    ),
    **{
        name: Format(
            cast.cast_encode_cpu,
            cast.cast_decode_cpu,
            lambda x, target=target: cast.cast_encode_reference(x, target),  # type: ignore[misc]
            lambda data, _n, target=target: cast.cast_decode_reference(data, target),  # type: ignore[misc]
            args=(target,),
            words=((4, 0), (8, 0)),
        )
        for name, target in (("bf16", floats.BFLOAT16), ("fp16", floats.IEEE))
    },
}
GROUPED = ("int8", "fp8", "mxfp8", "int4")
SIZES = (0, 1, 2, 31, 32, 33, 127, 128, 129, 1000)


def make_values(rng: np.random.Generator, n: int) -> dict[str, NDArray[np.float64]]:
    """Finite values of all kinds that formats treat in different ways."""
    x = rng.standard_normal(n)
    return {
        "normal": x,
        "relu": np.maximum(x, 0),
        "negative": -np.abs(x),
        "far from 0": 5 + 0.01 * x,
        "constant": np.full(n, -3.7),
        "sparse": x * (rng.random(n) < 0.1),
        "zeros": np.zeros(n),
        "signed zeros": np.where(x > 0, 0.0, -0.0),
        "spread": x * np.exp2(rng.integers(-6, 6, n)),
        "outlier": np.where(np.arange(n) == n // 2, 1e5, x),
        "small": x * 2.0**-140,
        "large": x * 2.0**122,
        "huge": x * 2.0**127,
        "halves": rng.integers(-40, 40, n) / 16,
    }


def as_tensor_words(x: NDArray[np.float64], word: int, kind: int) -> NDArray[Any]:
    """x as words of a format."""
    dtype = torch.bfloat16 if kind else {2: torch.float16, 4: torch.float32, 8: torch.float64}[word]
    same = {2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    return torch.from_numpy(x).to(dtype).view(same).numpy().view(f"u{word}")


# The worked examples of the documentation.


def read_example(page: str, name: str) -> bytes:
    text = (DOCS / f"{page}.md").read_text("utf-8")
    block = re.search(rf"<!-- example: {name} -->\n```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    data = bytearray()
    for line in block[1].splitlines():
        offset, hexes = re.match(r" *(\d+)  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  |$)", line).groups()  # type: ignore[union-attr]
        assert int(offset) == len(data), line
        data += bytes.fromhex(hexes)
    return bytes(data)


@pytest.mark.parametrize(
    ("page", "name", "values"),
    [
        ("int8", "int8", [1, -0.5, 0.25, 0]),
        ("fp8", "fp8", [1, -0.3, 0.01, 0]),
        ("mxfp8", "mxfp8", [1, -0.3, 0.01, 0]),
        ("cast", "bf16", [1, -0.3, 1e-6, 0]),
        ("cast", "fp16", [1, -0.3, 1e-6, 0]),
    ],
)
def test_worked_example_is_what_the_kernel_writes(
    page: str, name: str, values: list[float]
) -> None:
    words = np.array(values, np.float32).view(np.uint32)
    assert FORMATS[name].encode_tile(words, 0) == read_example(page, name)


def test_int4_worked_example_is_what_the_kernel_writes() -> None:
    words = np.array([1, -0.5, 0.3, 0], np.float32).view(np.uint32)
    dst = np.full(2100, 0xA5, np.uint8)
    n = int4.int4_encode_cpu(words, dst, np.array([0, 1, 2 | 3 << 32], np.uint64), 0)
    assert dst[:n].tobytes() == read_example("int4", "int4")
    random = philox.random16_reference(np.arange(4), 1, 2 | 3 << 32)
    assert random.tolist() == [63446, 43011, 62034, 16618]


# Kernels and references: the same bytes, the same values.


@pytest.mark.parametrize(
    "words", [pytest.param((2, 4), id="2, 4"), pytest.param((8,), id="8", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_and_reference_agree(name: str, words: tuple[int, ...]) -> None:
    f = FORMATS[name]
    rng = np.random.default_rng(1)
    n_raw = n_encoded = 0
    some = [word for word in f.words if word[0] in words]
    for (word, kind), n in itertools.product(some, (*SIZES, 2048, 4700)):
        for what, x in make_values(rng, n).items():
            tile = as_tensor_words(x, word, kind)
            expected = f.encode_reference(floats.widen_reference(tile, kind))
            assert f.encode_tile(tile, kind) == expected, (word, kind, n, what)
            if expected is None:
                n_raw += 1
                continue
            n_encoded += 1
            found = np.full_like(tile, 0xA5)
            assert f.decode_tile(expected, found, kind) == 0
            x_hat = f.decode_reference(expected, n)
            again = floats.narrow_reference(x_hat, tile.dtype, kind)
            np.testing.assert_array_equal(found, again, f"{word} {kind} {n} {what}")
    assert n_raw > 5 * len(some)
    assert n_encoded > 100 * len(some)


@pytest.mark.parametrize("n", [2, 20])
def test_int4_random_bits_follow_the_place_of_the_tile(n: int) -> None:
    x = np.random.default_rng(2).standard_normal(300).astype(np.float32)
    first = 4096 * n + 2**33
    data = FORMATS["int4"].encode_tile(x.view(np.uint32), 0, first)
    assert data == int4.int4_encode_reference(x, KEY.seed, STREAM, first)
    assert data != int4.int4_encode_reference(x, KEY.seed, STREAM, 0)


def scale_of(name: str, x: NDArray[np.float64], group: int) -> NDArray[np.float64]:
    """For each value the largest step (int8, int4) or scale (fp8, mxfp8) of its group."""
    padded = np.pad(x, (0, -x.size % group), mode="edge").reshape(-1, group)
    largest = np.abs(padded).max(1)
    zero_or_lo, zero_or_hi = padded.min(1, initial=0), padded.max(1, initial=0)
    scale = {
        "int8": (zero_or_hi - zero_or_lo) / 255 * (1 + 2.0**-14),
        "fp8": largest / 448,
        "mxfp8": largest / 256,
        "int4": np.maximum((padded.max(1) - padded.min(1)) / 14, largest * 2.0**-14)
        * (1 + 2.0**-7),
    }[name]
    least = {"int8": 2.0**-126, "fp8": 2.0**-126, "mxfp8": 2.0**-127, "int4": 2.0**-100}[name]
    return np.repeat(np.maximum(scale, least), group)[: x.size]


@pytest.mark.parametrize("name", GROUPED)
def test_error_is_within_the_bound_of_each_group(name: str) -> None:
    group = {"int8": 128, "fp8": 128, "mxfp8": 32, "int4": 32}[name]
    codec = cswap.get_codec(name)
    for what, x in make_values(np.random.default_rng(5), 9000).items():
        t = torch.from_numpy(x).float().clamp(-3e38, 3e38)
        x_hat = codec.decode(codec.encode(t, key=KEY)).double().numpy()
        exact = t.double().numpy()
        s = scale_of(name, exact, group)
        error = np.abs(exact - x_hat)
        bound = {
            "int8": np.maximum(s / 2, (s - np.abs(exact)) * (exact != 0)),
            "fp8": 2.0**-4 * np.abs(exact) + 2.0**-10 * s,
            "mxfp8": 2.0**-3 * np.abs(exact) + 2.0**-10 * s,
            "int4": s,
        }[name]
        slack = 2.0**-22 * np.abs(exact) + 2.0**-149
        assert (error <= bound + slack).all(), (what, (error / (bound + slack)).max())
        assert (x_hat[exact == 0] == 0).all(), f"{what}: a zero did not stay zero"


NONZERO = ("int8",)
"""Formats whose encoders decode no value to 0 that is not 0, where there is a code for it."""


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        pytest.param(*word, marks=pytest.mark.slow if word[0] == 8 else ())
        for word in FORMATS["int8"].words
    ],
)
@pytest.mark.parametrize("name", NONZERO)
def test_what_is_not_zero_keeps_its_sign(name: str, word: int, kind: int) -> None:
    codec, n_checked = cswap.get_codec(name), 0
    dtype = torch.bfloat16 if kind else {2: torch.float16, 4: torch.float32, 8: torch.float64}[word]
    for what, x in make_values(np.random.default_rng(6), 9000).items():
        if word == 2 and kind == floats.IEEE and what in ("large", "huge"):
            continue  # nothing but infinities
        t = torch.from_numpy(x).to(dtype)
        x_hat = codec.decode(codec.encode(t, key=KEY))
        exact, sign = t.double().numpy(), x_hat.sign().double().numpy()
        # Only a side of 0 that ends within half a step of it has no codes.
        padded = np.pad(exact, (0, -exact.size % 128)).reshape(-1, 128)
        ends = np.repeat([padded.min(1), padded.max(1)], 128, axis=1)[:, : exact.size]
        end = np.where(exact < 0, -ends[0], ends[1])
        has_code = end > scale_of(name, exact, 128) / 2
        np.testing.assert_array_equal(sign[has_code], np.sign(exact[has_code]), what)
        n_checked += int(np.count_nonzero(exact[has_code]))
    assert n_checked > 50_000


def test_int8_rounds_to_zero_on_a_side_without_codes() -> None:
    codec = cswap.get_codec("int8")
    for side in (1, -1):
        x = side * torch.tensor([255.0, -0.2, 0.2, 0.0]).repeat(128)  # a step of about 1
        x_hat = codec.decode(codec.encode(x))
        step = x_hat[0] / 255
        assert 1 < float(step) * side < 1.01
        assert torch.equal(x_hat, torch.tensor([255.0, 0.0, 1.0, 0.0]).repeat(128) * step)


@pytest.mark.parametrize("name", ["int8", "zvc+int8", "int4", "zvc+int4"])
def test_relu_masks_survive(name: str) -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(3)).relu()
    codec = cswap.get_codec(name)
    assert torch.equal(codec.decode(codec.encode(x)) > 0, x > 0)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("int8", 0.5, 0.65),
        ("fp8", 2.4, 2.7),
        ("mxfp8", 2.6, 3.1),
        ("int4", 11.5, 12.6),
        ("bf16", 0.16, 0.18),
    ],
)
def test_relative_rms_error_on_normal_values(name: str, least: float, most: float) -> None:
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
    codec = cswap.get_codec(name)
    percent = 100 * float((codec.decode(codec.encode(x)) - x).norm() / x.norm())
    assert least < percent < most


@pytest.mark.parametrize(
    ("name", "dtype", "ratio"),
    [
        ("int8", torch.float32, 3.871),
        ("int8", torch.bfloat16, 1.938),
        pytest.param("int8", torch.float64, 7.728, marks=pytest.mark.slow),
        ("fp8", torch.float32, 3.871),
        ("mxfp8", torch.float16, 1.938),
        ("mxfp8", torch.complex64, 3.871),
        ("int4", torch.float32, 6.380),
        ("int4", torch.bfloat16, 3.195),
        ("bf16", torch.float32, 1.998),
    ],
)
def test_ratio_of_whole_tiles(name: str, dtype: torch.dtype, ratio: float) -> None:
    x = torch.randn(1 << 15, dtype=torch.float32).to(dtype)
    assert cswap.get_codec(name).encode(x).ratio == pytest.approx(ratio, abs=6e-4)


# Which tiles are stored raw.


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("outlier", [float("inf"), float("nan"), -(2.0**126), 2.0**13])
def test_tile_with_outlier_is_stored_raw(name: str, outlier: float) -> None:
    x = torch.rand(3 * 4096) + 1  # of one exponent
    x[5000] = outlier
    codec = cswap.get_codec(name)
    x_hat = codec.decode(codec.encode(x))
    parts = zip(x.split(4096), x_hat.split(4096), strict=True)
    same = [torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in parts]
    assert same == [False, True, False]


@pytest.mark.parametrize("name", GROUPED)
def test_tile_with_a_moderate_outlier_is_encoded(name: str) -> None:
    x = torch.rand(4096) + 1
    x[77] = 2.0**12
    codec = cswap.get_codec(name)
    assert not torch.equal(codec.decode(codec.encode(x)), x)


@pytest.mark.parametrize("name", GROUPED)
def test_tile_is_raw_from_just_above_twelve_octaves(name: str) -> None:
    for exponent in (24, 25):
        words = np.array([2.0**exponent, 1, 0, 0], np.float32).view(np.uint32)
        assert (FORMATS[name].encode_tile(words, 0) is None) == (exponent == 25)


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPED)
def test_float64_beyond_float32_is_kept(name: str) -> None:
    x = torch.randn(100, dtype=torch.float64)
    x[3] = 1e300
    codec = cswap.get_codec(name)
    assert torch.equal(codec.decode(codec.encode(x)), x)
    x[3] = 1e-300
    assert float(codec.decode(codec.encode(x))[3]) == 0.0


@pytest.mark.parametrize("name", GROUPED)
def test_float16_near_its_largest_stays_finite(name: str) -> None:
    x = torch.full((8192,), 65504.0, dtype=torch.float16)
    x[::2] = -65504
    x[::3] = 60000
    codec = cswap.get_codec(name)
    assert torch.isfinite(codec.decode(codec.encode(x))).all()


# Hostile tiles, beyond the battery's.


@pytest.mark.parametrize("name", FORMATS)
def test_tile_of_a_wrong_length_is_refused(name: str) -> None:
    f = FORMATS[name]
    for n in SIZES:
        data = f.encode_reference(np.ones(n, np.float32))
        assert data is not None
        words = np.zeros(n, np.uint32)
        assert f.decode_tile(data, words, 0) == 0
        for length in {0, 1, len(data) - 1, len(data) + 1, len(data) + 16, 2 * len(data)}:
            if length not in (len(data), -1):
                wrong = (data + bytes(length))[:length]
                assert f.decode_tile(wrong, words, 0) == -1, (n, length)


def test_registry_makes_each_codec_and_takes_no_parameter() -> None:
    for name in FORMATS:
        assert cswap.get_codec(name).name == name
        assert not cswap.get_codec(name).lossless
        with pytest.raises(ConfigError, match="takes no parameter"):
            cswap.get_codec(f"{name}:3")
