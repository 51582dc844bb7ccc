"""A process may end while a plan is being made."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from cswap.fit.background import Background

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


UNTIL_THE_END = """
import sys
import time

from cswap.fit.background import Background, is_ending


def work():
    while not is_ending():
        time.sleep(0.01)
    print("ended")


running = Background(work)
sys.exit(4)
"""


def test_work_knows_that_the_process_ends_and_is_waited_for(forked):
    done = forked.run(UNTIL_THE_END)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (4, "ended", "")


def test_a_fork_has_no_result():
    """Its thread is in the other process."""
    background = Background(lambda: 1)
    assert background.result() == 1
    background._future = Future()
    assert background.done
    with pytest.raises(TimeoutError):
        background.result()


def test_an_error_of_the_work_is_raised_where_its_result_is_asked_for():
    def work():
        raise RuntimeError("no plan")

    with pytest.raises(RuntimeError, match="no plan"):
        Background(work).result()
