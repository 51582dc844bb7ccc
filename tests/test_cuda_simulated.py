"""Every CUDA kernel's logic against its CPU twin, in Numba's CUDA simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "simulated").glob("test_*.py"))
AT_ONCE = 2


def run(file):
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    command += ["-W", "ignore::RuntimeWarning"]  # integers wrap around, as on a GPU
    return subprocess.run(
        command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def running():
    """A process for each file, two at a time: the simulator keeps but one core busy."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {file: pool.submit(run, file) for file in FILES}


@pytest.mark.timeout(540)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_simulator(running, file):
    done = running[file].result()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
