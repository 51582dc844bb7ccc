"""The kernels' machine code, as NVIDIA's disassembler shows it."""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytest.importorskip("numba.cuda.extending", reason="numba-cuda is not installed")
pytest.importorskip("cuda.core", reason="numba-cuda's linker is not installed")

from bench.ptx.machine_code import REMEDY, disassemble, disassembler, parse
from cswap_kernels.cuda import compiler, formats

pytestmark = pytest.mark.skipif(disassembler() is None, reason=f"no nvdisasm: {REMEDY}")

FLOATING = ("FMUL", "FADD", "FFMA", "DMUL", "DADD", "DFMA")

LOSSY = [
    pytest.param(name, word, direction, id=f"{name}-{word}-{direction}")
    for name in ("int8", "fp8", "mxfp8", "int4", "zvc+int4", "zvc+int8")
    for word in formats.FORMATS[name]
    for direction in ("encode", "decode")
]

SUM_OF_PRODUCT = """.version 8.0
.target sm_75
.address_size 64
.visible .entry k(
	.param .u64 a
)
.maxntid 256, 1, 1
{
	.reg .f32 	%f<9>;
	.reg .b64 	%rd<9>;
	ld.param.u64 	%rd1, [a];
	ld.global.v2.f32 	{%f1, %f2}, [%rd1];
	mul.f32 	%f3, %f1, %f2;
	add.f32 	%f4, %f3, %f1;
	st.global.f32 	[%rd1], %f4;
	ret;
}
"""


LOOPS = """
        /*0000*/                   MOV R0, R1 ;
.L_x_0:
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_1:
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0030*/              @P0 BRA `(.L_x_1) ;
        /*0040*/              @P1 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
"""


def test_loops_are_where_branches_lead_back():
    code = parse(LOOPS)
    assert code.loops == ((2, 4), (1, 5))
    assert [code.innermost(k) for k in range(6)] == [(0, 6), (1, 5), (2, 4), (2, 4), (1, 5), (0, 6)]


def floating(ptx, architecture):
    """How many instructions of each kind compute with floats."""
    code = disassemble(compiler.link(ptx, architecture).code)
    ops = (i.op.split(".")[0] for i in code.code)
    return Counter(op for op in ops if op in FLOATING)


@pytest.mark.parametrize(
    "architecture", [90, *(pytest.param(a, marks=pytest.mark.slow) for a in (75, 120))]
)
def test_the_linker_fuses_nothing(architecture):
    assert floating(SUM_OF_PRODUCT, architecture) == {"FMUL": 1, "FADD": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "word", "direction"), LOSSY)
def test_products_and_sums_of_a_kernel_are_not_fused(name, word, direction):
    """As many of each kind as where every product and sum is marked to be rounded by itself.

    Divisions hold fused instructions of their own; so their mere presence says nothing.
    """
    ptx = compiler.compile_ptx(*formats.kernel(name, word, direction), cc=90)
    marked = re.sub(r"\b(mul|add|sub)\.(f32|f64)\b", r"\1.rn.\2", ptx)
    assert marked != ptx
    assert floating(ptx, 90) == floating(marked, 90)
