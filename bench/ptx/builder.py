"""A basic block of PTX becomes the source of a Python function that runs many threads at once.

The function is ``block(S, R, i, n)``: S is the block of threads, R the registers (an array of a
value per thread each), i the threads that run it, n their number.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from bench.ptx.faults import UnsupportedError
from bench.ptx.parse import DTYPE

if TYPE_CHECKING:
    from bench.ptx.parse import Instruction, Module

NUMPY: Final = {k: "np.bool_" if k == "pred" else f"np.{v.name}" for k, v in DTYPE.items()}
"""The name of the numpy type of each PTX type."""

_SPECIAL: Final = {
    "%tid.x": "S.tid[i]",
    "%ntid.x": "S.ntid",
    "%ctaid.x": "S.ctaid",
    "%nctaid.x": "S.nctaid",
    "%laneid": "(S.tid[i] & np.uint32(31))",
}
_ZERO: Final = {f"%{a}.{x}" for a in ("tid", "ctaid") for x in "yz"}
_ONE: Final = {f"%{a}.{x}" for a in ("ntid", "nctaid") for x in "yz"}


class Names:
    """Names that operands can stand for: registers, shared arrays and parameters of one module."""

    def __init__(self, module: Module, shared_at: dict[str, int]) -> None:
        self.index = {name: k for k, name in enumerate(module.registers)}
        self.types = [module.registers[name] for name in module.registers]
        self.shared_at = shared_at
        self.params = {name: (kind, k) for k, (name, kind) in enumerate(module.params)}


class Builder:
    """Collects the lines of one function; emitters of opcodes call its methods.

    Attributes:
        lines: of the function so far.
        read_first: registers that it reads before it writes them.
    """

    def __init__(self, names: Names) -> None:
        self.lines: list[str] = []
        self.read_first: set[str] = set()
        self._names = names
        self._value: dict[str, str] = {}
        self._dirty: dict[str, str] = {}
        self._count = 0

    def finish(self, name: str, branch: Instruction | None, live: set[str]) -> str:
        """The function's source: it stores the registers that others read, returns the branch's
        condition per thread, and None if there is no branch."""
        result = None
        if branch is not None and branch.guard is not None:
            result = self.read(branch.guard, "pred")
            result = f"~{result}" if branch.negated else result
        lines = [*self.lines, *([] if result is None else [f"r = {result}"])]
        for register, value in self._dirty.items():
            if register in live or register in self.read_first:
                lines.append(f"R[{self._names.index[register]}][i] = {value}")
        lines.append("return None" if result is None else "return r")
        return f"def {name}(S, R, i, n):\n" + "\n".join(f"    {line}" for line in lines)

    def held(self, operand: str, default: str) -> str:
        """The type of a register; ``default`` for another operand."""
        index = self._names.index.get(operand)
        return default if index is None else self._names.types[index]

    def assign(self, expression: str) -> str:
        """A new variable with that value."""
        self._count += 1
        self.lines.append(f"v{self._count} = {expression}")
        return f"v{self._count}"

    def read(self, operand: str, kind: str) -> str:
        """An expression of the numpy type of ``kind``.

        Raises:
            UnsupportedError: the operand is unknown, or has another width.
        """
        if operand in self._names.index:
            return self._read_register(operand, kind)
        if operand in _SPECIAL or operand in _ZERO | _ONE:
            found = _SPECIAL.get(operand, f"np.uint32({int(operand in _ONE)})")
            return found if DTYPE[kind] == DTYPE["u32"] else f"{found}.view({NUMPY[kind]})"
        if operand in self._names.shared_at:
            return f"{NUMPY[kind]}({self._names.shared_at[operand]})"
        if found_bits := re.fullmatch(r"0f([0-9A-Fa-f]{8})", operand):
            return f"np.uint32(0x{found_bits[1]}).view(np.float32)"
        if found_bits := re.fullmatch(r"0d([0-9A-Fa-f]{16})", operand):
            return f"np.uint64(0x{found_bits[1]}).view(np.float64)"
        if re.fullmatch(r"-?\d+|-?0x[0-9a-fA-F]+U?", operand):
            return _immediate(int(operand.rstrip("U"), 0), kind)
        raise UnsupportedError(f"operand {operand}")

    def write(self, register: str, expression: str, kind: str) -> None:
        """Let a register hold a value of ``kind``, extended where the register is wider."""
        if register == "_":
            return
        if register not in self._names.index:
            raise UnsupportedError(f"register {register}")
        found = self.assign(self._fit(register, expression, kind))
        self._value[register] = self._dirty[register] = found

    def address(self, operand: str) -> str:
        """The address of each thread, [n] u64."""
        found = re.fullmatch(r"\[([%\w@$]+)(?:\+(-?\d+))?\]", operand)
        if not found:
            raise UnsupportedError(operand)
        base, offset = found[1], int(found[2] or 0)
        if base in self._names.shared_at:
            return f"np.full(n, {self._names.shared_at[base] + offset}, np.uint64)"
        if base not in self._names.index:
            raise UnsupportedError(operand)
        kind = self.held(base, "u64")
        value = self.read(base, kind)
        if DTYPE[kind].itemsize == 4:
            value = f"{value}.astype(np.uint64)"
        if offset:
            value = f"({value} + np.uint64({offset & (1 << 64) - 1}))"
        return f"np.broadcast_to({value}, (n,))"

    def parameter(self, operand: str) -> tuple[str, str]:
        """(type, expression) of a kernel's parameter."""
        found = re.fullmatch(r"\[(\w+)\]", operand)
        if not found:
            raise UnsupportedError(operand)
        kind, k = self._names.params[found[1]]
        return kind, f"S.params[{k}]"

    def _read_register(self, register: str, kind: str) -> str:
        held = self.held(register, kind)
        value = self._value.get(register)
        if value is None:
            self.read_first.add(register)
            value = self.assign(f"R[{self._names.index[register]}][i].copy()")
            self._value[register] = value
        if (held == "pred") != (kind == "pred"):
            raise UnsupportedError(f"{register}: {held} as {kind}")
        if held == "pred" or DTYPE[held] == DTYPE[kind]:
            return value
        if DTYPE[held].itemsize != DTYPE[kind].itemsize:
            raise UnsupportedError(f"{register}: {held} as {kind}")
        return f"{value}.view({NUMPY[kind]})"

    def _fit(self, register: str, expression: str, kind: str) -> str:
        held = self.held(register, kind)
        if (held == "pred") != (kind == "pred"):
            raise UnsupportedError(f"{register}: {held} from {kind}")
        if held == "pred" or DTYPE[held] == DTYPE[kind]:
            return expression
        wide, narrow = DTYPE[held], DTYPE[kind]
        if wide.itemsize == narrow.itemsize:
            return f"({expression}).view({NUMPY[held]})"
        if wide.itemsize > narrow.itemsize and narrow.kind in "iu" and wide.kind == "u":
            extended = f"np.{'int' if narrow.kind == 'i' else 'uint'}{8 * wide.itemsize}"
            return f"({expression}).astype({extended}).view({NUMPY[held]})"
        raise UnsupportedError(f"{register}: {held} from {kind}")


def _immediate(value: int, kind: str) -> str:
    if kind == "pred":
        return f"np.bool_({value != 0})"
    dtype = DTYPE[kind]
    bits = 8 * dtype.itemsize
    if dtype.kind == "f" or not -(1 << (bits - 1)) <= value < 1 << bits:
        raise UnsupportedError(f"{value} as {kind}")
    value &= (1 << bits) - 1
    if dtype.kind == "i" and value >> (bits - 1):
        value -= 1 << bits
    return f"{NUMPY[kind]}({value})"
