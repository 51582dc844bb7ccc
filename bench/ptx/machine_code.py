"""Machine code of a kernel as text, with the line of the PTX that each instruction comes from.

The disassembler is NVIDIA's nvdisasm, of the package nvidia-cuda-nvdisasm or of a CUDA toolkit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

REMEDY: Final = "pip install nvidia-cuda-nvdisasm, or set NVDISASM to the path of nvdisasm"

_INSTRUCTION: Final = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(.*?);")
_LABEL: Final = re.compile(r"\s*(\.L_x_\d+):")
_BRANCH: Final = re.compile(r"\bBRA\b.*?`\((\.L_x_\d+)\)")
_LINE: Final = re.compile(r"\s*//## .*, line (\d+)")
_ENDS: Final = ("BRA", "EXIT", "BSYNC", "RET", "BRX", "JMP")


@dataclass(frozen=True, slots=True)
class MachineInstruction:
    """One instruction.

    Attributes:
        line: of the PTX that it comes from; 0 if that is not known.
        op: opcode with its modifiers, "LDS.128", without a predicate.
        text: as nvdisasm prints it.
    """

    line: int
    op: str
    text: str


@dataclass(frozen=True, slots=True)
class MachineCode:
    """A kernel's machine code.

    Attributes:
        code: instructions up to the last one of the main path.
        starts: indices at which basic blocks begin, ascending, from 0 on.
        loops: (first, behind the last) index of each loop: from where a branch leads back to.
    """

    code: tuple[MachineInstruction, ...]
    starts: tuple[int, ...]
    loops: tuple[tuple[int, int], ...] = ()

    def blocks(self) -> list[tuple[MachineInstruction, ...]]:
        """The basic blocks."""
        ends = (*self.starts[1:], len(self.code))
        return [self.code[a:b] for a, b in zip(self.starts, ends, strict=True)]

    def innermost(self, index: int) -> tuple[int, int]:
        """The smallest loop around an instruction; all of the code if there is none."""
        around = [loop for loop in self.loops if loop[0] <= index < loop[1]]
        return min(around, key=lambda loop: loop[1] - loop[0], default=(0, len(self.code)))


@cache
def disassembler() -> str | None:
    """Path of nvdisasm, or None if there is none."""
    given = os.environ.get("NVDISASM") or shutil.which("nvdisasm")
    if given:
        return given
    for folder in sys.path:
        for path in Path(folder).glob("nvidia/*/bin/nvdisasm"):
            return str(path)
    return None


def disassemble(cubin: bytes) -> MachineCode:
    """The code of a cubin with one kernel, linked with line information.

    Raises:
        FileNotFoundError: there is no nvdisasm.
        subprocess.CalledProcessError: it refuses the cubin.
    """
    program = disassembler()
    if program is None:
        raise FileNotFoundError(f"nvdisasm is not installed: {REMEDY}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [program, "--print-code", "--print-line-info-ptx", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return parse(done.stdout)


def parse(text: str) -> MachineCode:
    """The code in nvdisasm's output.

    >>> text = '''
    ... //## File ".nv_debug_ptx_txt.1", line 7
    ...         /*0000*/              @!P0 BRA `(.L_x_0) ;
    ... //## File ".nv_debug_ptx_txt.1", line 8
    ...         /*0010*/                   STS.128 [R2], R4 ;
    ... .L_x_0:
    ...         /*0020*/                   EXIT ;
    ...         /*0030*/                   NOP ;
    ... '''
    >>> found = parse(text)
    >>> [(i.line, i.op) for i in found.code], found.starts
    ([(7, 'BRA'), (8, 'STS.128'), (8, 'EXIT')], (0, 1, 2))
    """
    code: list[MachineInstruction] = []
    starts, labels, line = {0}, {}, 0
    for row in text.splitlines():
        if found := _LINE.match(row):
            line = int(found[1])
        elif found := _LABEL.match(row):
            starts.add(len(code))
            labels[found[1]] = len(code)
        elif found := _INSTRUCTION.match(row):
            op = re.sub(r"^@!?U?PT?\d*\s+", "", found[1]).split()[0]
            code.append(MachineInstruction(line, op, found[1].strip()))
            if op.startswith(_ENDS):
                starts.add(len(code))
    del code[_length(code) :]
    loops = tuple(
        (first, k + 1)
        for k, i in enumerate(code)
        if (found := _BRANCH.search(i.text)) and (first := labels.get(found[1], k + 1)) <= k
    )
    return MachineCode(tuple(code), tuple(sorted(s for s in starts if s < len(code))), loops)


def _length(code: list[MachineInstruction]) -> int:
    # Instructions up to the end of the kernel. Code behind it never runs here: ways for warps
    # whose lanes have parted (BRA.DIV leads there), divisions of odd operands, padding.
    barrier = max((k for k, i in enumerate(code) if i.op.startswith("BAR")), default=0)
    for k in range(barrier, len(code)):
        if code[k].op == "EXIT" and not code[k].text.startswith("@"):
            return k + 1
    return len(code)
