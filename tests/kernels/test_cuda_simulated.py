"""Every CUDA kernel's logic against its CPU twin, in Numba's CUDA simulator.

By default only the profiler's kernel: tests/ptx runs the machine-independent code of the others,
which is faster and sees more. The simulator shows where in the Python code something goes wrong.
Numba reads NUMBA_ENABLE_CUDASIM when it is imported, so each file runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "simulated").glob("test_*.py"))
ONLY_HERE = ROOT / "tests" / "simulated" / "test_profile.py"
"""Of the kernel that tests/ptx does not run."""


def simulate(file: Path, selection: str, names: str = "") -> None:
    """Run the tests of a file that a marker expression, and one of names, selects."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    command += ["-m", selection, "-k", names]
    command += ["-W", "ignore::RuntimeWarning"]  # integers wrap, as on a GPU
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.timeout(540)
def test_in_the_simulator():
    simulate(ONLY_HERE, "not slow", "not fp64")  # its words take the longest


@pytest.mark.slow
@pytest.mark.timeout(540)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_simulator_every_case(file):
    simulate(file, "")
