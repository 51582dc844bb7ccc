"""A kernel of PTX as a graph of basic blocks, each a Python function of many threads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.ptx import floats, integers, opcodes
from bench.ptx.builder import Builder, Names
from bench.ptx.faults import UnsupportedError
from bench.ptx.parse import DTYPE, Instruction, parse

SHARED_BASE: Final = 0x100000
"""Address of the first shared array."""

RED_ZONE: Final = 1 << 12
"""Bytes behind each shared array that belong to nobody."""

_SYNC: Final = ("bar.", "barrier.", "shfl.", "vote.", "match.", "activemask", "redux.")

Run = Callable[[Any, list[NDArray[Any]], Any, int], Any]


@dataclass(slots=True)
class Node:
    """A basic block, or one operation at which threads wait for others.

    Attributes:
        first: index of its first instruction.
        last: index behind its last one.
        line: of the first one, in the text.
        run: its function; None where ``sync`` is set.
        sync: the operation that threads wait at.
        target: register of the result of a bar.red.
        jump: node that its branch leads to, or None.
        conditional: whether the branch is.
        exits: whether threads end here.
    """

    first: int
    last: int
    line: int
    run: Run | None = None
    sync: Instruction | None = None
    target: str | None = None
    jump: int | None = None
    conditional: bool = False
    exits: bool = False


class Kernel:
    """A parsed and translated entry.

    Attributes:
        text: the PTX.
        module: parsed.
        names: its registers, shared arrays and parameters.
        nodes: in the order of the text; behind each comes the next unless it jumps.
        shared_end: address behind the last shared array.
    """

    def __init__(self, text: str) -> None:
        """Raises:
        UnsupportedError: the interpreter does not know something in the text.
        """
        self.text = text
        self.module = parse(text)
        shared_at, at = {}, SHARED_BASE
        for name, nbytes, align in self.module.shared:
            shared_at[name] = at
            at = -(-(at + nbytes + RED_ZONE) // 256) * 256
            # Aligned as declared and no better: by luck an error would not be seen.
            at += align if align < 256 else 0
        self.shared_end = at
        self.names = Names(self.module, shared_at)
        self.nodes = _nodes(self.module.code, self.module.labels)
        self._translate()
        self._junk: dict[int, list[NDArray[Any]]] = {}

    def junk(self, threads: int) -> list[NDArray[Any]]:
        """First contents of the registers of so many threads."""
        if threads not in self._junk:
            rng, made = np.random.default_rng(threads), []
            for kind in self.names.types:
                dtype = DTYPE[kind]
                if kind == "pred":
                    made.append(rng.integers(0, 2, threads).astype(bool))
                else:
                    nbytes = threads * dtype.itemsize
                    made.append(rng.integers(0, 256, nbytes, dtype=np.uint8).view(dtype))
            self._junk[threads] = made
        return self._junk[threads]

    def _translate(self) -> None:
        code = self.module.code
        live = _live(self.nodes, code, self.names)
        source = []
        for n, node in enumerate(self.nodes):
            if node.sync is not None:
                continue
            body, last = code[node.first : node.last], code[node.last - 1]
            builder = Builder(self.names)
            for instruction in body[:-1] if _ends(last) else body:
                opcodes.emit(builder, instruction)
            branch = last if node.conditional else None
            source.append(builder.finish(f"n{n}", branch, live))
        functions = {k: getattr(integers, k, None) or getattr(floats, k) for k in opcodes.NAMES}
        space: dict[str, Any] = {"np": np, **functions}
        exec(compile("\n".join(source), "<ptx>", "exec"), space)
        for n, node in enumerate(self.nodes):
            node.run = space.get(f"n{n}")


def _ends(instruction: Instruction) -> bool:
    return instruction.op.startswith("bra") or instruction.op in ("ret", "exit")


def _nodes(code: list[Instruction], labels: dict[str, int]) -> list[Node]:
    starts = {0, *labels.values()}
    for k, instruction in enumerate(code):
        if _ends(instruction):
            starts.add(k + 1)
        if instruction.op.startswith(_SYNC):
            starts.update((k, k + 1))
            if instruction.guard:
                raise UnsupportedError(f"predicated: {instruction.text}")
    order = sorted(s for s in starts if s < len(code))
    number = {start: n for n, start in enumerate(order)}
    nodes = []
    for first, after in zip(order, [*order[1:], len(code)], strict=True):
        node = Node(first, after, code[first].line)
        last = code[after - 1]
        if code[first].op.startswith(_SYNC):
            node.sync = code[first]
            if node.sync.op.startswith("bar.red."):
                node.target, *rest = node.sync.args
                node.sync = replace(node.sync, args=tuple(rest))
        elif last.op.startswith("bra"):
            node.jump = number.get(labels[last.args[0]], len(order))
            node.conditional = last.guard is not None
        elif _ends(last):
            if last.guard:
                raise UnsupportedError(f"predicated: {last.text}")
            node.exits = True
        nodes.append(node)
    if nodes[-1].sync is not None or not (nodes[-1].exits or nodes[-1].jump is not None):
        raise UnsupportedError("the entry ends without ret")
    return nodes


def _live(nodes: list[Node], code: list[Instruction], names: Names) -> set[str]:
    # Registers that more than one node uses.
    uses = defaultdict(set)
    for n, node in enumerate(nodes):
        for instruction in code[node.first : node.last]:
            text = " ".join([*instruction.args, instruction.guard or ""])
            for register in re.findall(r"%\w+(?:@\d+)?(?:\.\w)?", text):
                if register in names.index:
                    uses[register].add(n)
    return {register for register, found in uses.items() if len(found) > 1}
