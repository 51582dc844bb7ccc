"""How many machine instructions a kernel executes per word, without a GPU.

The interpreter counts how often each basic block of the PTX runs. The linker says from which line
of the PTX each machine instruction comes. Both together give how often that is executed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.ptx.kernel import Kernel
    from bench.ptx.machine_code import MachineCode, MachineInstruction

_SAME: Final = {
    "LDS": "ld",
    "LDG": "ld",
    "STS": "st",
    "STG": "st",
    "SHFL": "shfl",
    "VOTE": "vote",
    "BAR": "bar",
    "REDUX": "redux",
    "CREDUX": "redux",
    "POPC": "popc",
    "ATOMG": "atom",
}
"""Machine instructions of which there is exactly one per PTX instruction, and that one's opcode."""


@dataclass(frozen=True, slots=True)
class Executed:
    """Machine instructions that warps execute.

    Attributes:
        by_op: how many, by opcode with modifiers.
    """

    by_op: Mapping[str, float]

    @property
    def total(self) -> float:
        """Of all opcodes."""
        return sum(self.by_op.values())


def executed(kernel: Kernel, code: MachineCode, runs: Mapping[int, float]) -> Executed:
    """How often each opcode is executed; arguments as for `times_of_blocks`."""
    found: defaultdict[str, float] = defaultdict(float)
    for times, block in times_of_blocks(kernel, code, runs):
        for instruction in block:
            found[instruction.op] += times
    return Executed({op: count for op, count in found.items() if count})


def times_of_blocks(
    kernel: Kernel, code: MachineCode, runs: Mapping[int, float]
) -> list[tuple[float, tuple[MachineInstruction, ...]]]:
    """(how often warps run it, its instructions) of each basic block of machine code.

    A basic block of machine code runs as often as the PTX that it comes from, divided by the
    copies that unrolling made of that. Where its instructions come from several blocks of PTX,
    the median counts. Instructions that the compiler moved out of a loop are told by where most
    others of their block of PTX are; they run as often as the code around them.

    Args:
        kernel: the PTX.
        code: linked from it, with line information.
        runs: how often warps run each node of the kernel.
    """
    owner = _owners(kernel)
    copies, homes = _copies(kernel, code, owner), _homes(code, owner)
    found, last = [], dict[tuple[int, int], float]()
    for start, block in zip(code.starts, code.blocks(), strict=True):
        loop = code.innermost(start)
        known = [owner[i.line] for i in block if i.line in owner]
        own = [n for n in known if not _is_inside(homes[n], loop)]
        times = last.get(loop, 0.0) if known else 0.0
        if own:
            times = last[loop] = median_low([runs.get(n, 0.0) / copies[n] for n in own])
        found.append((times, block))
    return found


def _homes(code: MachineCode, owner: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    # The loop in which most instructions of each node are.
    found: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for k, i in enumerate(code.code):
        if i.line in owner:
            found[owner[i.line]][code.innermost(k)] += 1
    return {n: loops.most_common(1)[0][0] for n, loops in found.items()}


def _is_inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def _owners(kernel: Kernel) -> dict[int, int]:
    # The node of each line of PTX.
    code = kernel.module.code
    return {
        instruction.line: n
        for n, node in enumerate(kernel.nodes)
        for instruction in code[node.first : node.last]
    }


def _copies(kernel: Kernel, code: MachineCode, owner: Mapping[int, int]) -> dict[int, int]:
    # How many copies of each node there are in the machine code.
    opcode = {i.line: i.op.split(".")[0] for i in kernel.module.code}
    seen: dict[int, Counter[tuple[int, str]]] = defaultdict(Counter)
    exact: dict[int, Counter[tuple[int, str]]] = defaultdict(Counter)
    for i in code.code:
        if i.line in owner:
            seen[owner[i.line]][i.line, i.op] += 1
            if _SAME.get(i.op.split(".")[0]) == opcode[i.line]:
                exact[owner[i.line]][i.line, i.op] += 1
    return {n: min((exact.get(n) or counts).values()) for n, counts in seen.items()}
