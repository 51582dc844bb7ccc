"""Every CUDA kernel's logic against its CPU twin, in Numba's CUDA simulator.

The processes run beside the other tests, see conftest.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "simulated").glob("test_*.py"))


@pytest.mark.timeout(540)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_simulator(simulated, file):
    done = simulated[file].result()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
