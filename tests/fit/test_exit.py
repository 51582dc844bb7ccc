"""A process may end while a plan is being made."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("scipy")

SCRIPT = """
import sys
import time

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from cswap.fit.background import Background

rng = np.random.default_rng(0)
weights = rng.integers(0, 100, (6, 50)).astype(float)  # a market split: hard for its size
half = LinearConstraint(weights, weights.sum(1) // 2, weights.sum(1) // 2)


def solve():
    milp(
        rng.random(50), constraints=half, integrality=np.ones(50), bounds=Bounds(0, 1),
        options={"time_limit": 1.5},
    )


running = Background(solve)
time.sleep(0.5)
assert not running.done
sys.exit(3)
"""


def test_a_process_that_ends_while_the_solver_runs_keeps_its_status():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (3, b"")
