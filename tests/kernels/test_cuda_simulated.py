"""Every CUDA kernel's logic against its CPU twin, in Numba's CUDA simulator.

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
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def simulate(file: Path, selection: str) -> None:
    """Run the tests of a file that a marker expression selects."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    command += ["-m", selection, "-W", "ignore::RuntimeWarning"]  # integers wrap, as on a GPU
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
@each_file
def test_in_the_simulator(file):
    simulate(file, "not slow")


@pytest.mark.slow
@pytest.mark.timeout(540)
@each_file
def test_in_the_simulator_every_case(file):
    simulate(file, "")
