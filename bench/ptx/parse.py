"""From the text of a PTX module with one entry to its instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bench.ptx.faults import UnsupportedError

DTYPE: Final[dict[str, np.dtype[Any]]] = {
    **{f"u{8 * k}": np.dtype(f"u{k}") for k in (1, 2, 4, 8)},
    **{f"b{8 * k}": np.dtype(f"u{k}") for k in (1, 2, 4, 8)},
    **{f"s{8 * k}": np.dtype(f"i{k}") for k in (1, 2, 4, 8)},
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "pred": np.dtype("?"),
}
"""The numpy type of each PTX type."""

_SHARED: Final = re.compile(
    r"(?:\.visible |\.weak |\.extern )?\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];"
)
_NUMBAS_GLOBAL: Final = re.compile(r"\.common \.global \.align 8 \.u64 _ZN\d*NumbaEnv\w+;")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One PTX instruction.

    Attributes:
        op: opcode with its modifiers, "add.s32".
        args: operands as written.
        guard: the predicate register in front of it, or None.
        negated: whether the guard is.
        line: of the text, from 1.
        text: the whole line.
        used: of a load: a bit for each byte that counts, by a pragma; -1 for all.
    """

    op: str
    args: tuple[str, ...]
    guard: str | None
    negated: bool
    line: int
    text: str
    used: int = -1


@dataclass(slots=True)
class Module:
    """A parsed module.

    Attributes:
        name: of the entry.
        params: (name, type) in order.
        shared: (name, bytes, alignment) of each shared array.
        registers: type by name.
        code: all instructions.
        labels: index of the instruction behind each label.
        max_threads: per block, if the entry says so.
    """

    name: str = ""
    params: list[tuple[str, str]] = field(default_factory=list)
    shared: list[tuple[str, int, int]] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    max_threads: int | None = None


def parse(text: str) -> Module:
    """The instructions of a module with one entry.

    Raises:
        UnsupportedError: a directive is unknown, or there is not exactly one complete entry.
    """
    parser = _Parser()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.split("//")[0].strip()
        if line:
            parser.take(number, line)
    return parser.finish()


def split_operands(text: str) -> tuple[str, ...]:
    """Operands, separated by commas outside of brackets.

    >>> split_operands("{%r1, %r2}, [%rd3+4], 5")
    ('{%r1, %r2}', '[%rd3+4]', '5')
    """
    found, depth, current = [], 0, ""
    for letter in text:
        depth += letter in "{["
        depth -= letter in "}]"
        if letter == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    if current.strip():
        found.append(current.strip())
    return tuple(found)


class _Parser:
    # Where in the text it is: "module", "params", "head" (between these and the body) or "body".

    def __init__(self) -> None:
        self._module = Module()
        self._state = "module"
        self._scopes: list[dict[str, str]] = []
        self._n_scopes = 0
        self._used = -1

    def take(self, number: int, line: str) -> None:
        """Go on by one line."""
        handle = {
            "module": self._module_line,
            "params": self._param_line,
            "head": self._head_line,
            "body": self._body_line,
        }[self._state]
        if not handle(number, line):
            raise UnsupportedError(f"{number}: {line}")

    def finish(self) -> Module:
        """The module, if it is complete."""
        if not self._module.name or self._state != "module":
            raise UnsupportedError("no complete entry")
        return self._module

    def _module_line(self, _number: int, line: str) -> bool:
        if line.startswith((".version", ".target")) or line == ".address_size 64":
            return True
        if found := _SHARED.fullmatch(line):
            self._module.shared.append((found[2], int(found[3]), int(found[1])))
            return True
        if _NUMBAS_GLOBAL.fullmatch(line):
            return True
        if (found := re.match(r"\.visible \.entry (\w+)\(", line)) and not self._module.name:
            self._module.name = found[1]
            self._state = "head" if line.endswith(")") else "params"
            return True
        return False

    def _param_line(self, _number: int, line: str) -> bool:
        if line == ")":
            self._state = "head"
            return True
        found = re.fullmatch(r"\.param \.(\w\d+) (\w+),?", line)
        if found:
            self._module.params.append((found[2], found[1]))
        return found is not None

    def _head_line(self, _number: int, line: str) -> bool:
        if line == "{":
            self._state = "body"
        elif line.startswith(".maxntid"):
            self._module.max_threads = int(re.findall(r"\d+", line)[0])
        else:
            return line.startswith(".minnctapersm")
        return True

    def _body_line(self, number: int, line: str) -> bool:
        if line == "{":
            self._scopes.append({})
            self._n_scopes += 1
        elif line == "}":
            if self._scopes:
                self._scopes.pop()
            else:
                self._state = "module"
        elif found := re.fullmatch(r"(\$\w+):", line):
            self._module.labels[found[1]] = len(self._module.code)
        else:
            for statement in filter(None, (s.strip() for s in line.split(";"))):
                if not self._directive(statement):
                    self._instruction(number, line, statement)
        return True

    def _directive(self, statement: str) -> bool:
        if found := re.fullmatch(r"\.reg \.(\w+)\s+(%\w+)<(\d+)>", statement):
            names = (f"{found[2]}{k}" for k in range(int(found[3])))
            self._module.registers.update(dict.fromkeys(names, found[1]))
        elif found := re.fullmatch(r"\.reg \.(\w+)\s+(%\w+)", statement):
            own = f"{found[2]}@{self._n_scopes}"  # of this scope alone
            self._scopes[-1][found[2]] = own
            self._module.registers[own] = found[1]
        elif found := re.fullmatch(r'\.pragma\s+"used_bytes_mask (\w+)"', statement):
            self._used = int(found[1], 0)
        elif not re.fullmatch(r'\.pragma\s+"nounroll"', statement):
            if statement.startswith("."):
                raise UnsupportedError(statement)
            return False
        return True

    def _instruction(self, number: int, line: str, statement: str) -> None:
        guard, negated = None, False
        if found := re.match(r"@(!?)(%\w+)\s+", statement):
            guard, negated, statement = found[2], bool(found[1]), statement[found.end() :]
        op, *rest = statement.split(maxsplit=1)
        operands = rest[0] if rest else ""
        for scope in self._scopes:
            for old, new in scope.items():
                operands = re.sub(re.escape(old) + r"\b", new, operands)
                guard = new if guard == old else guard
        self._module.code.append(
            Instruction(op, split_operands(operands), guard, negated, number, line, self._used)
        )
        self._used = -1
