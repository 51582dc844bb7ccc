"""The GPU tests in slices that end in time: `python -m bench.gpu.slices [SLICE]`, `make test-gpu`.

A slice's output goes to gpu-tests/SLICE.log line by line, so a killed run leaves its lines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cswap.errors import CswapError
from cswap.experiments.options import names

if TYPE_CHECKING:
    from collections.abc import Sequence

ALL: Final = "all"
FOLDER: Final = Path("gpu-tests")
LIMIT_S: Final = 480.0
"""Of a slice: machines are often lent for ten minutes at a time."""

TEST_LIMIT_S: Final = 120
"""Of a test, where pytest-timeout is installed."""

PROCESSES: Final = 12
"""Of a slice whose tests do not look at the memory in use, where pytest-xdist is installed."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some of the tests.

    Attributes:
        files: in tests/gpu.
        chosen: pytest's -k, or empty for all.
        parallel: whether several processes may run them at the same time.
    """

    files: tuple[str, ...]
    chosen: str = ""
    parallel: bool = False

    def command(self) -> list[str]:
        """The command that runs it."""
        found = [sys.executable, "-P"] if sys.version_info >= (3, 11) else [sys.executable]
        found += ["-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
        found += [f"tests/gpu/{file}" for file in self.files]
        if self.chosen:
            found += ["-k", self.chosen]
        if find_spec("pytest_timeout"):
            found += ["--timeout", str(TEST_LIMIT_S)]
        if self.parallel and find_spec("xdist"):
            found += ["-n", str(PROCESSES)]
        return found


SLICES: Final = {
    "codecs": Slice(("test_gpu_codecs.py",), parallel=True),
    "memory": Slice(("test_gpu_memory.py",)),
    "hazards": Slice(("test_gpu_hazards.py",)),
    "stress": Slice(("test_gpu_stress.py",)),
    "operators": Slice(("test_gpu_operators.py", "test_gpu_unread.py"), parallel=True),
    "nvcomp": Slice(("test_nvcomp_gpu.py",)),
    "sanitizer": Slice(("test_gpu_tools.py",)),
}
"""The most telling ones first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a slice ended.

    Attributes:
        name: of the slice.
        code: the exit code of its process.
        took_s: seconds.
        late: whether it was stopped at its limit.
        last: the last line that it printed.
    """

    name: str
    code: int
    took_s: float
    late: bool
    last: str

    @property
    def good(self) -> bool:
        """Whether its tests passed, or none were chosen (pytest's code 5)."""
        return not self.late and self.code in (0, 5)

    def __str__(self) -> str:
        """One line of the summary."""
        how = "stopped" if self.late else "passed" if self.good else f"failed ({self.code})"
        return f"{self.name:10} {how:12} {self.took_s:5.0f} s  {self.last}"


def run(name: str, command: Sequence[str], log: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Run a command; show its output, and write it to a file line by line.

    Args:
        name: of the slice.
        command: to run.
        log: file, replaced.
        limit_s: seconds after which the command is ended.
    """
    start, last, ended = time.monotonic(), "", threading.Event()
    with (
        log.open("w", encoding="utf-8", buffering=1) as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):

        def stop() -> None:
            ended.set()
            process.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                file.write(line)
                print(line, end="", flush=True)
                last = line.strip() or last
            code = process.wait()
        finally:
            timer.cancel()
    return Outcome(name, code, time.monotonic() - start, ended.is_set(), last)


def main(arguments: Sequence[str]) -> int:
    """Run slices by name; 0 if all is well, 1 if a test failed, 2 if there is no such slice."""
    chosen = arguments[0] if arguments else ALL
    try:
        found = list(SLICES) if chosen == ALL else names("SLICE", chosen, tuple(SLICES))
    except CswapError as error:
        print(error, file=sys.stderr)
        return 2
    if "CSWAP_CACHE_DIR" not in os.environ:
        print("CSWAP_CACHE_DIR is not set: kernels may have to be compiled anew, for minutes.")
    FOLDER.mkdir(exist_ok=True)
    outcomes = [run(name, SLICES[name].command(), FOLDER / f"{name}.log") for name in found]
    summary = "\n".join(str(outcome) for outcome in outcomes)
    (FOLDER / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    print(summary)
    return int(not all(outcome.good for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
