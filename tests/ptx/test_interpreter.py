"""The interpreter of PTX against kernels whose results are known."""

from __future__ import annotations

import numpy as np
import pytest

from bench.ptx.faults import DeadlockError, MemoryFaultError, UndefinedError
from bench.ptx.grid import run_blocks
from bench.ptx.kernel import Kernel
from bench.ptx.launch import Launch, Options
from bench.ptx.memory import Memory

TEXT = """.version 8.0
.target sm_75
.address_size 64
.visible .shared .align 16 .b8 s[2048];
.visible .entry k(
	.param .u64 a,
	.param .u64 b
)
.maxntid 256, 1, 1
{{
	.reg .pred 	%p<20>;
	.reg .b16 	%rs<20>;
	.reg .b32 	%r<40>;
	.reg .f32 	%f<20>;
	.reg .b64 	%rd<20>;
	ld.param.u64 	%rd1, [a];
	ld.param.u64 	%rd2, [b];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 8;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
	ld.global.u64 	%rd6, [%rd4];
	cvt.u32.u64 %r2, %rd6;
	mov.b32 %f1, %r2;
{body}
	st.global.u64 	[%rd5], %rd7;
	ret;
}}
"""
"""Makes %rd7 of %rd6 in every thread; %r1 is its index, %r2 and %f1 the low half of %rd6."""

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
NUMBERS = (0, 1, 5, 31, 32, 63, 64, 0x7FFFFFFF, 0x80000000, M32, 1 << 63, M64, 0x123456789ABCDEF0)
FLOATS = (0, 1 << 31, 0x3F800000, 0xBFC00000, 0x7F800000, 0xFF800000, 0x7FC01234, 1, 0x4F000000)
LANES = tuple(range(64))
NAN = 0x7FFFFFFF
OUT = "\ncvt.u64.u32 %rd7, %r3;"


def run(body, values, **options):
    """(results of the threads, notes)."""
    memory, given = Memory(1 << 16), np.array(values, np.uint64)
    a, b = memory.allocate(given.nbytes, fill=0), memory.allocate(given.nbytes)
    a.data[:] = given.view(np.uint8)
    kernel = Kernel(TEXT.format(body=body))
    launch = Launch(kernel, memory, 1, given.size, [a.address, b.address], Options(**options))
    report = run_blocks(launch)
    return b.data.view(np.uint64).tolist(), report.notes


def s32(x):
    return (x & M32) - ((x & M32) >> 31 << 32)


def prmt(a, b, selector):
    both = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    found = []
    for k in range(4):
        digit = selector >> 4 * k & 15
        byte = both[digit & 7]
        found.append((byte >> 7) * 255 if digit & 8 else byte)
    return int.from_bytes(bytes(found), "little")


def dot(a, b):
    return sum((a >> k & 255) * (b >> k & 255) for k in (0, 8, 16, 24))


INTEGERS = {
    "cvt.s64.s32 %rd7, %r2;": s32,
    "mul.wide.s32 %rd7, %r2, -3;": lambda x: s32(x) * -3,
    "shl.b64 %rd7, 3, %r2;": lambda x: 0 if x & M32 > 63 else 3 << (x & M32),
    "shr.s64 %rd7, %rd6, 36;": lambda x: (x - (x >> 63 << 64)) >> 36,
    "add.s32 %r3, %r2, 2147483647;" + OUT: lambda x: (x + 0x7FFFFFFF) & M32,
    "clz.b64 %r3, %rd6;" + OUT: lambda x: 64 - x.bit_length(),
    "popc.b64 %r3, %rd6;" + OUT: lambda x: x.bit_count(),
    "bfi.b32 %r3, %r2, 7, 5, 27;" + OUT: lambda x: (x << 5 & M32) | 7,
    "prmt.b32 %r3, %r2, 287454020, 63876;" + OUT: lambda x: prmt(x & M32, 0x11223344, 0xF984),
    "dp4a.u32.u32 %r3, %r2, 134480385, 7;" + OUT: lambda x: 7 + dot(x & M32, 0x08040201),
    "shf.l.wrap.b32 %r3, %r2, 305419896, %r2;" + OUT: lambda x: (
        (0x12345678 << 32 | x & M32) << (x & 31) >> 32 & M32
    ),
    "cvt.u16.u32 %rs1, %r2;\ncvt.s64.s8 %rd7, %rs1;": lambda x: (x + 128 & 255) - 128,
    "setp.lt.s64 %p1, %rd6, 0;\nselp.b64 %rd7, 7, %rd6, %p1;": lambda x: 7 if x >> 63 else x,
}


@pytest.mark.parametrize("body", INTEGERS)
def test_integers(body):
    assert run(body, NUMBERS)[0] == [INTEGERS[body](x) & M64 for x in NUMBERS]


F32 = "mov.b32 %r3, %f2;" + OUT


def f32(bits):
    return np.uint32(bits).view(np.float32)


def bits_of(x):
    return NAN if np.isnan(x) else int(np.float32(x).view(np.uint32))


FLOATING = {
    "cvt.rni.f32.f32 %f2, %f1;\n" + F32: lambda x: bits_of(np.rint(x)),
    "max.f32 %f2, %f1, 0f00000000;\n" + F32: lambda x: bits_of(x) if x > 0 else 0,
    "add.f32 %f2, %f1, 0f3F800000;\n" + F32: lambda x: bits_of(x + np.float32(1)),
    "fma.rn.f32 %f2, %f1, %f1, 0f3F800000;\n" + F32: lambda x: bits_of(
        np.float64(x) * np.float64(x) + 1
    ),
    "setp.ltu.f32 %p1, %f1, 0f3F800000;\nselp.u64 %rd7, 1, 0, %p1;": lambda x: int(not x >= 1),
    "setp.gt.f32 %p1, %f1, 0f3F800000;\nselp.u64 %rd7, 1, 0, %p1;": lambda x: int(x > 1),
}


@pytest.mark.parametrize("body", FLOATING)
def test_floats(body):
    with np.errstate(all="ignore"):
        expected = [FLOATING[body](f32(bits)) for bits in FLOATS]
    assert run(body, FLOATS)[0] == expected


WARP = "mov.u32 %r5, 31;\nmov.u32 %r6, 0;\nmov.u32 %r7, -1;\nmov.u32 %r8, 1;\n"
LOOP = """and.b32 %r4, %r2, 3;
	mov.u32 %r3, 0;
$L__top:
	setp.eq.s32 %p1, %r4, 0;
	@%p1 bra $L__end;
	add.s32 %r3, %r3, 10;
	add.s32 %r4, %r4, -1;
	bra.uni $L__top;
$L__end:
	shfl.sync.bfly.b32 %r9|%p1, %r3, %r8, %r5, %r7;
	add.s32 %r3, %r3, %r9;
"""
"""A loop of lane % 4 rounds, then a sum over two lanes."""

WARPS = {
    "shfl.sync.up.b32 %r3|%p1, %r2, %r8, %r6, %r7;": lambda x: x - (x % 32 > 0),
    "shfl.sync.bfly.b32 %r3|%p1, %r2, %r8, %r5, %r7;": lambda x: x ^ 1,
    "shfl.sync.idx.b32 %r3|%p1, %r2, 5, %r5, %r7;": lambda x: x - x % 32 + 5,
    "redux.sync.add.s32 %r3, %r2, -1;": lambda x: 496 + 1024 * (x // 32),
    "and.b32 %r4, %r2, 1;\nsetp.ne.s32 %p1, %r4, 0;\nvote.sync.ballot.b32 %r3, %p1, -1;": (
        lambda _x: 0xAAAAAAAA
    ),
    LOOP: lambda x: 10 * ((x & 3) + ((x ^ 1) & 3)),
}


@pytest.mark.parametrize("schedule", ["block", "warp"])
@pytest.mark.parametrize("body", WARPS)
def test_warps(body, schedule):
    found, notes = run(WARP + body + OUT, LANES, schedule=schedule)
    assert (found, dict(notes)) == ([WARPS[body](x) for x in LANES], {})


def reversal(barrier, last):
    """Words through shared memory, in reverse order."""
    return f"""mov.u64 %rd8, s;
	add.s64 %rd9, %rd8, %rd3;
	st.shared.u64 [%rd9], %rd6;
	{barrier}
	mov.u32 %r10, {last};
	sub.s32 %r11, %r10, %r1;
	mul.wide.u32 %rd10, %r11, 8;
	add.s64 %rd11, %rd8, %rd10;
	ld.shared.u64 %rd7, [%rd11];"""


@pytest.mark.parametrize("schedule", ["block", "warp"])
def test_a_race_is_seen_where_a_barrier_is_missing(schedule):
    found, notes = run(reversal("bar.sync 0;", 63), LANES, schedule=schedule)
    assert (found, dict(notes)) == (list(reversed(LANES)), {})
    _, notes = run(reversal("", 63), LANES, schedule=schedule)
    assert any("RACE" in note or "unwritten" in note for note in notes)


def test_only_a_barrier_orders_the_lanes_of_a_warp():
    lanes = LANES[:32]
    found, notes = run(reversal("bar.warp.sync -1;", 31), lanes)
    assert (found, dict(notes)) == (list(reversed(lanes)), {})
    _, notes = run(reversal("vote.sync.ballot.b32 %r3, %p1, -1;", 31), lanes)
    assert {note.split()[0] for note in notes} == {"weak:"}
    _, notes = run(reversal("", 31), lanes)
    assert any(note.startswith("RACE within") for note in notes)


SPLIT = "setp.gt.u32 %p1, %r1, 40;\n@%p1 bra $L__x;\n"
FAULTS = {
    "outside": (MemoryFaultError, "ld.global.u64 %rd7, [%rd4+8];"),
    "misaligned": (MemoryFaultError, "ld.global.u64 %rd7, [%rd4+4];"),
    "before the start": (MemoryFaultError, "st.global.u64 [%rd5+-8], %rd6;\nmov.u64 %rd7, 0;"),
    "wide and misaligned": (
        MemoryFaultError,
        "ld.global.nc.L1::no_allocate.v4.u32 {%r2,%r3,%r4,%r5}, [%rd4];\nmov.u64 %rd7, 0;",
    ),
    "a vote and a barrier": (
        DeadlockError,
        SPLIT + "vote.sync.ballot.b32 %r3, %p1, -1;\nbra.uni $L__y;\n"
        "$L__x:\nbar.sync 0;\n$L__y:\nmov.u64 %rd7, 0;",
    ),
    "a mask of other lanes": (
        UndefinedError,
        SPLIT + "vote.sync.ballot.b32 %r3, %p1, 255;\n$L__x:\nmov.u64 %rd7, 0;",
    ),
    "two barriers": (
        UndefinedError,
        SPLIT + "bar.sync 0;\nbra.uni $L__y;\n$L__x:\nbar.sync 0;\n$L__y:\nmov.u64 %rd7, 0;",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name):
    error, body = FAULTS[name]
    with pytest.raises(error):
        run(body, LANES)


def test_atomics_lose_nothing():
    body = """mov.u64 %rd8, s;
	setp.ne.s32 %p1, %r1, 0;
	@%p1 bra $L__z;
	st.shared.u64 [%rd8], 0;
$L__z:
	bar.sync 0;
	atom.shared.add.u32 %r3, [%rd8], %r2;
	bar.sync 0;
	ld.shared.u64 %rd7, [s];"""
    assert run(body, LANES)[0] == [sum(LANES)] * len(LANES)
