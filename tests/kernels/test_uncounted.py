"""Note [uncounted arrays]: the same memory, alive as long as the caller's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from cswap_kernels.jit import njit
from cswap_kernels.uncounted import uncounted


class Pair(NamedTuple):
    a: np.ndarray
    b: np.ndarray


def count(g):
    g = uncounted(g)
    for i in range(len(g.a)):
        others = np.full(len(g.a), -1)  # takes memory that was freed too early
        others[i] = g.a[i]
        g.b[others[i]] += 1


inlined = njit(forceinline=True)(count)


@njit()
def counted_locals(a):
    g = Pair(a.copy(), np.zeros(len(a), np.int64))
    inlined(g)
    return g.b


@njit()
def locals_used_no_more(a, b):
    inlined(Pair(a.copy(), b))


@pytest.mark.parametrize("run", [count, njit()(count)])
def test_writes_reach_the_arrays(run):
    g = Pair(np.array([0, 1, 1, 3, 2]), np.zeros(5, np.int64))
    run(g)
    assert g.b.tolist() == [1, 2, 1, 1, 0]


def test_the_caller_keeps_local_arrays_alive():
    a, b = np.arange(1000)[::-1].copy(), np.zeros(1000, np.int64)
    assert (counted_locals(a) == 1).all()
    locals_used_no_more(a, b)
    assert (b == 1).all()
