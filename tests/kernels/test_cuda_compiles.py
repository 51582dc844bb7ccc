"""Every CUDA kernel becomes machine code without a GPU, with the properties it was designed for."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("numba.cuda.extending", reason="numba-cuda is not installed")
pytest.importorskip("cuda.core", reason="numba-cuda's linker is not installed")

from cswap_kernels.cuda import compiler, formats

KERNELS = [
    pytest.param(name, word, direction, id=f"{name}-{word}-{direction}")
    for name, words in formats.FORMATS.items()
    for word in words
    for direction in ("encode", "decode")
]

COMPOSED = [row for row in formats.FORMATS.items() if "+" in row[0]]
ONE_KERNEL = [
    pytest.param(
        *(name, words[i % len(words)], ("decode", "encode")[i % 2]),
        id=name,
        marks=pytest.mark.slow,
    )
    for i, (name, words) in enumerate(COMPOSED)
]
"""One kernel per composition, word sizes and directions in turn: a kernel takes seconds to compile.
tests/ptx compiles and runs the formats that compositions are made of, one of them in `make test`.
The slow tests compile every kernel of all formats.
"""

BY_RECIPROCAL = ("fp8", "zvc+fp8")
"""Formats that divide by a reciprocal and two corrections, which are fused on purpose."""

MAX_SHARED_BYTES = 48 << 10
"""Of static shared memory; what every architecture gives without asking."""


def linked(ptx, architectures):
    """Machine code for some architectures; the linker lets go of the interpreter's lock."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda a: compiler.link(ptx, a), architectures))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "word", "direction"), KERNELS)
def test_kernel_compiles_for_every_architecture(name, word, direction):
    check_kernel(name, word, direction, compiler.ARCHITECTURES)


@pytest.mark.parametrize(("name", "word", "direction"), ONE_KERNEL)
def test_kernel_compiles_for_the_oldest_architecture(name, word, direction):
    check_kernel(name, word, direction, compiler.ARCHITECTURES[:1])


def check_kernel(name, word, direction, architectures):
    """It compiles, with the properties that it was designed for."""
    kernel, signature = formats.kernel(name, word, direction)
    ptx = compiler.compile_ptx(kernel, signature)
    assert "call" not in ptx  # every device function is inlined
    assert ".local" not in ptx  # a stack would be slow memory
    assert re.search(r"ld\.global\.nc\S*\.v4\.u32", ptx)
    assert re.search(r"st\.global\.cs\.v4\.u32", ptx)
    assert re.findall(r"\.shared \.align (\d+)", ptx)[:2] == ["16", "16"]  # for 16-byte accesses
    assert not re.search(r"\bdiv\.s64|\brem\.s64", ptx)  # a loop of 70 instructions each
    if name not in BY_RECIPROCAL:  # would round once where the CPU's twin rounds twice
        assert not re.search(r"\bfma\.", ptx)
    for made in linked(ptx, architectures):
        assert made.code[:4] == b"\x7fELF"
        assert made.local_bytes == 0
        assert 0 < made.shared_bytes <= MAX_SHARED_BYTES
        assert made.registers <= 64
