"""A process may end while a plan is being made."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

SCRIPT = """
import sys
import time

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from cswap.fit.background import Background

rng = np.random.default_rng(0)
weights = rng.random((1, 30))


def solve():
    # Whenever the solver returns, its thread wants the interpreter, which may have ended.
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        at_most = LinearConstraint(weights, 0.0, weights.sum() / 3)
        milp(-rng.random(30), constraints=at_most, integrality=np.ones(30), bounds=Bounds(0, 1))


running = Background(solve)
time.sleep(0.5)
assert not running.done
sys.exit(3)
"""


def test_a_process_that_ends_while_the_solver_runs_keeps_its_status(forked):
    done = forked.run(SCRIPT)
    assert (done.returncode, done.stderr) == (3, "")
