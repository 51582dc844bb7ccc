"""Bounds that are computed from the CUDA kernels' machine code, and what is made of them."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("typer")

from bench.gpu.static_tables import FILE, kernels_table
from bench.pages.committed import load
from cswap.codecs.registry import get_codec

DESIGN = {
    ("zvc", "float32", "encode"): 1300,
    ("zvc", "float32", "decode"): 1500,
    ("zvc", "bfloat16", "encode"): 900,
    ("zvc", "bfloat16", "decode"): 1200,
    ("expk", "bfloat16", "encode"): 1000,
    ("expk", "bfloat16", "decode"): 1800,
    ("int8", "float32", "encode"): 1800,
    ("int8", "float32", "decode"): 2000,
    ("fp8", "float32", "encode"): 1800,
    ("fp8", "float32", "decode"): 2000,
    ("bitpack", "int64", "encode"): 1800,
}
"""GB/s of raw bytes on an H200 that kernels were designed for."""

SLOWEST = "A100"
"""Of the processors that bounds are computed for."""

WITH_RATES = (
    "zvc",
    "csr",
    "rle",
    "bitpack",
    "expk",
    "bf16",
    "fp16",
    "int8",
    "fp8",
    "mxfp8",
    "int4",
)


@pytest.fixture(scope="module")
def committed():
    """The committed rows by codec, dtype, direction and architecture."""
    rows = load(FILE)["rows"]
    return {(r["codec"], r["dtype"], r["direction"], r["architecture"]): r for r in rows}


def rounded_down(rate):
    """To two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return math.floor(rate / unit) * unit


def bounds(committed, codec, dtype):
    """(encode, decode) bytes per second at most, on the slowest processor."""
    rows = [committed[codec, dtype, d, 80] for d in ("encode", "decode")]
    return [row["bound_bytes_per_s"][SLOWEST] for row in rows]


@pytest.mark.parametrize("kernel", DESIGN, ids="-".join)
def test_machine_code_allows_the_rate_that_the_kernel_was_designed_for(committed, kernel):
    row = committed[(*kernel, 90)]
    assert row["bound_bytes_per_s"]["H200"] >= 1e9 * DESIGN[kernel]
    assert row["local_bytes"] == 0


def test_a_bound_is_the_lower_of_issue_and_memory(committed):
    for row in committed.values():
        for name, bound in row["bound_bytes_per_s"].items():
            assert bound == min(row["issue_bytes_per_s"][name], row["memory_bytes_per_s"][name])


@pytest.mark.parametrize("codec", WITH_RATES)
def test_default_cuda_rates_are_the_bounds_of_the_slowest_processor(committed, codec):
    dtype = "int64" if codec == "bitpack" else "float32"
    rate = get_codec(codec).traits.rates["cuda"]
    found = [rate.encode_bytes_per_s, rate.decode_bytes_per_s]
    assert found == [rounded_down(b) for b in bounds(committed, codec, dtype)]


@pytest.mark.parametrize("codec", ["expk", "int8", "fp8", "int4"])
def test_default_cuda_rates_after_zvc_are_the_bounds_of_the_slowest_processor(committed, codec):
    rate = get_codec(codec).traits.rates_after_zvc["cuda"]
    found = [rate.encode_bytes_per_s, rate.decode_bytes_per_s]
    assert found == [rounded_down(b) for b in bounds(committed, f"zvc+{codec}", "float32")]


def test_the_table_says_that_it_is_computed():
    assert "Computed, not measured" in kernels_table()


@pytest.mark.slow
def test_a_row_is_computed(committed):
    pytest.importorskip("numba.cuda.extending", reason="numba-cuda is not installed")
    from bench.gpu import static
    from bench.ptx.machine_code import REMEDY, disassembler

    if disassembler() is None:
        pytest.skip(f"no nvdisasm: {REMEDY}")
    found = {(r["dtype"], r["direction"]): r for r in static.rows("bf16", 90)}
    assert len(found) == 4
    for (dtype, direction), row in found.items():
        before = committed["bf16", dtype, direction, 90]
        assert row["ratio"] == before["ratio"] == (4 if dtype == "float64" else 2)
        assert row["blocks"] == before["blocks"]
        assert row["instructions"] == pytest.approx(before["instructions"], rel=0.25)
