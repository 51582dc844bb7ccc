"""Operations by which the lanes of a warp exchange values: shfl, vote, match, redux."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.ptx.faults import UndefinedError, UnsupportedError
from bench.ptx.parse import DTYPE

if TYPE_CHECKING:
    from bench.ptx.parse import Instruction
    from bench.ptx.registers import Registers

Lanes = NDArray[Any]

_REDUCE: Final = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
    "xor": np.bitwise_xor,
}


def exchange(registers: Registers, i: Instruction, threads: Lanes) -> None:
    """Run one operation for the threads [n], which are in order and meet there.

    Raises:
        UnsupportedError: the operation is unknown.
        UndefinedError: a lane reads from one that takes no part.
    """
    kind = i.op.split(".")[0]
    if i.op == "bar.warp.sync":
        return
    if kind not in _OPERATIONS:
        raise UnsupportedError(i.text)
    _OPERATIONS[kind](registers, i, threads)


def _shuffle(registers: Registers, i: Instruction, threads: Lanes) -> None:
    mode = i.op.split(".")[2]
    target, _, predicate = i.args[0].partition("|")
    lanes, firsts = threads & 31, threads & ~31
    value = registers.operand(i.args[1], threads)
    b = registers.operand(i.args[2], threads).astype(np.int64) & 31
    c = registers.operand(i.args[3], threads).astype(np.int64)
    clamp, segment = c & 31, c >> 8 & 31
    low = lanes & segment
    top = low | (clamp & ~segment)
    source = {
        "up": lanes - b,
        "down": lanes + b,
        "bfly": lanes ^ b,
        "idx": low | (b & ~segment),
    }[mode]
    inside = source >= top if mode == "up" else source <= top
    source = np.where(inside, source, lanes)
    place = np.full(registers.n_threads, -1)
    place[threads] = np.arange(threads.size)
    found = place[np.minimum(firsts + source, registers.n_threads - 1)]
    if (found < 0).any():
        raise UndefinedError(f"{i.line}: shfl reads a lane that takes no part")
    registers.set(target, threads, value[found])
    if predicate:
        registers.set(predicate, threads, inside)


def _vote(registers: Registers, i: Instruction, threads: Lanes) -> None:
    mode = i.op.split(".")[2]
    given = registers.operand(i.args[1].lstrip("!"), threads).astype(bool)
    given = ~given if i.args[1].startswith("!") else given
    lanes, firsts = threads & 31, threads & ~31
    n_warps = threads.size // 32
    whole = threads.size % 32 == 0 and (lanes == np.tile(np.arange(32), n_warps)).all()
    if mode == "ballot" and whole:
        bits = np.packbits(given.reshape(-1, 32), axis=1, bitorder="little").view(np.uint32)
        registers.set(i.args[0], threads, np.repeat(bits.ravel(), 32))
        return
    for first in np.unique(firsts):
        mine = firsts == first
        if mode == "ballot":
            value: Any = np.uint32(sum(1 << int(k) for k in lanes[mine & given]))
        elif mode in ("any", "all"):
            value = given[mine].any() if mode == "any" else given[mine].all()
        else:
            raise UnsupportedError(i.text)
        registers.set(i.args[0], threads[mine], value)


def _match(registers: Registers, i: Instruction, threads: Lanes) -> None:
    if not i.op.startswith("match.any.sync."):
        raise UnsupportedError(i.text)
    value = registers.operand(i.args[1], threads)
    lanes, firsts = threads & 31, threads & ~31
    for first in np.unique(firsts):
        for k in np.flatnonzero(firsts == first):
            same = (firsts == first) & (value == value[k])
            bits = np.uint32(sum(1 << int(lane) for lane in lanes[same]))
            registers.set(i.args[0], threads[k : k + 1], bits)


def _reduce(registers: Registers, i: Instruction, threads: Lanes) -> None:
    _, _, what, kind = i.op.split(".")
    value = registers.operand(i.args[1], threads).view(DTYPE[kind])
    firsts = threads & ~31
    for first in np.unique(firsts):
        mine = firsts == first
        reduced = np.asarray(_REDUCE[what].reduce(value[mine])).astype(value.dtype)
        registers.set(i.args[0], threads[mine], np.atleast_1d(reduced).view(np.uint32)[0])


_OPERATIONS: Final = {"shfl": _shuffle, "vote": _vote, "match": _match, "redux": _reduce}
