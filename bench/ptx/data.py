"""Words to encode: kinds of values that a format treats differently, and odd bit patterns."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[Any]

UNSIGNED: Final[dict[int, type[np.unsignedinteger[Any]]]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS: Final = (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64)
ANY: Final = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
"""One dtype for every word size."""

_BITS: Final = {
    torch.bfloat16: (8, 7),
    torch.float16: (5, 10),
    torch.float32: (8, 23),
    torch.float64: (11, 52),
}
"""Bits of exponent and mantissa."""

USUAL: Final = (
    *("zeros", "random bits", "sparse 60", "runs", "one word", "31 words", "normal", "relu"),
    *("mask", "all -0", "denormals", "wide", "one nan", "one inf", "one max", "all odd"),
    *("beyond f32", "small signed", "5 bits", "f16 limit", "bf16 limit"),
)
"""Cases of a run that is not a full one."""


def words_of_floats(x: NDArray[np.float64], dtype: torch.dtype) -> Words:
    """Values as words of a float dtype; bfloat16 is cut off, not rounded."""
    word = dtype.itemsize
    with np.errstate(all="ignore"):
        if dtype == torch.bfloat16:
            return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return x.astype(f"f{word}").view(UNSIGNED[word])


def odd_bits(dtype: torch.dtype) -> dict[str, int]:
    """Bits of values of a float dtype that arithmetic treats in a way of its own."""
    e, m = _BITS[dtype]
    top, sign = ((1 << e) - 1) << m, 1 << (e + m)
    return {
        "inf": top,
        "-inf": top | sign,
        "nan": top | 1 << (m - 1) | 5,
        "snan": top | 3,
        "-nan": sign | top | (1 << m) - 1,
        "-0": sign,
        "tiny": 1,
        "-tiny": sign | 3,
        "small": (1 << m) - 1,
        "least": 1 << m,
        "max": top - 1,
        "-max": sign | top - 1,
        "one": ((1 << e - 1) - 1) << m,
    }


def cases(
    dtype: torch.dtype, tile: int, rng: np.random.Generator, *, full: bool
) -> dict[str, Words]:
    """Words by kind, around one or two tiles of ``tile`` words each."""
    found = _any_words(dtype, tile, rng)
    if dtype == torch.bool:
        return {name: words & np.uint8(1) for name, words in found.items()}
    if dtype.is_floating_point:
        found |= _floats(dtype, tile, rng) | _odd_floats(dtype, tile, rng)
    elif dtype != torch.uint8:
        found |= _integers(dtype.itemsize, tile, rng)
    return found if full else {name: found[name] for name in USUAL if name in found}


def _random(rng: np.random.Generator, n: int, word: int) -> Words:
    values = rng.integers(0, 1 << 8 * word, n, dtype=np.uint64, endpoint=False)
    return values.astype(UNSIGNED[word])


def _any_words(dtype: torch.dtype, tile: int, rng: np.random.Generator) -> dict[str, Words]:
    word = dtype.itemsize
    u, top = UNSIGNED[word], (1 << 8 * word) - 1
    n, long = tile + 33, 2 * tile + 33
    runs = np.cumsum(rng.random(n) < 1 / 40) % n
    ramp = np.arange(tile + 300, dtype=np.uint64) * np.uint64(3) + np.uint64(top // 2 + 1)
    return {
        "zeros": np.zeros(tile + 5, u),
        "random bits": _random(rng, n, word),
        "sparse 60": (_random(rng, long, word) | u(1)) * (rng.random(long) < 0.4).astype(u),
        "sparse 97": (_random(rng, n, word) | u(1)) * (rng.random(n) < 0.03).astype(u),
        "runs": rng.integers(0, 4, n).astype(u)[runs],
        "ramp": ramp.astype(u),
        "max": np.full(tile, top, u),
        "one word": _random(rng, 1, word),
        "31 words": _random(rng, 31, word) & u(7),
    }


def _integers(word: int, tile: int, rng: np.random.Generator) -> dict[str, Words]:
    u = UNSIGNED[word]
    found = {
        f"{bits} bits": ((_random(rng, tile + 77, word) & u((1 << bits) - 1)) - u(3)).astype(u)
        for bits in (1, 5, 8 * word - 1)
    }
    small = rng.integers(-100, 100, tile + 33).astype(f"i{word}")
    return found | {"small signed": small.view(u)}


def _floats(dtype: torch.dtype, tile: int, rng: np.random.Generator) -> dict[str, Words]:
    n = tile + 33
    normal = rng.normal(size=n) * 2.0 ** rng.integers(-6, 6, n)
    normal[::11], normal[5::37], normal[7::41] = 0.0, -0.0, 3e-40
    reach = (-130, 126) if dtype.itemsize > 2 else (-14, 14)
    groups = np.repeat(2.0 ** rng.integers(*reach, n // 32 + 1), 32)[:n]
    values = {
        "normal": normal,
        "relu": np.maximum(rng.normal(size=n), 0),
        "dropout": rng.normal(size=n) * (rng.random(n) < 0.9),
        "mask": (rng.random(tile + 9) < 0.5).astype(float),
        "constant": np.full(tile + 1, -7.25),
        "narrow": 1 + rng.random(tile + 130) * 0.01,
        "wide": rng.normal(size=n) * groups,
    }
    if dtype.itemsize > 2:  # the least magnitudes that casts store raw, and one just below
        values["f16 limit"], values["bf16 limit"] = (rng.normal(size=tile + 70) for _ in range(2))
        values["f16 limit"][[9, tile + 40]] = 65520, 65519.9
        values["bf16 limit"][[9, tile + 40]] = 3.3961775292304601e38, 3.3961e38
    if dtype == torch.float64:
        values["beyond f32"] = rng.normal(size=tile + 3) * 1e-44
        values["f32 limit"] = rng.normal(size=tile + 3)
        values["f32 limit"][9] = 3.4028235677973366e38  # becomes infinite as a float32
    return {name: words_of_floats(x, dtype) for name, x in values.items()}


def _odd_floats(dtype: torch.dtype, tile: int, rng: np.random.Generator) -> dict[str, Words]:
    u, odd = UNSIGNED[dtype.itemsize], odd_bits(dtype)
    denormals = np.full(tile + 40, odd["tiny"], u)
    denormals[::3], denormals[1::5] = odd["small"], odd["-tiny"]
    mixed = words_of_floats(rng.normal(size=tile + 64), dtype)
    for k, bits in enumerate(odd.values()):
        mixed[3 + k :: 29] = bits
    found = {"all -0": np.full(tile, odd["-0"], u), "denormals": denormals, "all odd": mixed}
    for name in ("nan", "snan", "inf", "-inf", "max", "-max", "-nan", "small", "least"):
        x = words_of_floats(rng.normal(size=tile + 70), dtype)
        x[tile - 1], x[tile + 40] = odd[name], odd[name]
        found[f"one {name}"] = x
    return found
