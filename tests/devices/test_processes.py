"""Processes that fork, and processes that end while tensors are swapped."""

from __future__ import annotations

import os

import pytest

CHILD = """
import os, sys
import torch
from torch import nn
import cswap

net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.Sigmoid())
x = torch.randn(256, 256)

def gradients():
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]

def held(handle):
    handle.engine.synchronize()
    return handle.stats.device_bytes, handle.stats.host_bytes

torch.set_num_threads(1)
expected = gradients()
handle = cswap.install(net, min_bytes=0, codec="zvc")
for _ in range(3):
    y = net(x)
    pid = os.fork()
    if pid == 0:
        del y
        for _ in range(20):
            net(x)  # without a backward: nothing may pile up
        fine = held(handle) == (0, 0)
        fine = fine and all(map(torch.equal, gradients(), expected))
        fine = fine and not handle.stats.fallbacks
        os._exit(0 if fine else 3)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    del y
    assert all(map(torch.equal, gradients(), expected))
assert held(handle) == (0, 0)
"""

GRAPH_ACROSS_A_FORK = """
import os
import torch
import cswap

torch.set_num_threads(1)
x = torch.randn(1 << 16, requires_grad=True)
with cswap.swapping(min_bytes=0, codec="zvc"):
    y = (x * 2).sin().sum()
pid = os.fork()
(found,) = torch.autograd.grad(y, x)  # in both
assert torch.equal(found, (x * 2).cos() * 2)
if pid == 0:
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
"""

ENDS = """
import torch
from torch import nn
import cswap

torch.set_num_threads(1)
net = nn.Sequential(*(m for _ in range(80) for m in (nn.Linear(64, 64), nn.ReLU())))
x = torch.randn(512, 64)
handle = cswap.install(net, {options})
net(x)
y = net(x)
{last}
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    "program",
    [pytest.param(CHILD, marks=pytest.mark.slow), GRAPH_ACROSS_A_FORK],
    ids=["steps", "one graph"],
)
def test_a_forked_child_swaps_and_leaks_nothing(program, forked):
    done = forked.run(program)
    assert (done.returncode, done.stderr) == (0, "")


ALL, DEFAULTS = "min_bytes=0, codec='zvc'", ""


@pytest.mark.parametrize(
    ("options", "last"),
    [
        pytest.param(ALL, "raise SystemExit", marks=pytest.mark.slow),
        (DEFAULTS, "y.sum().backward()"),
        pytest.param(ALL, "del y", marks=pytest.mark.slow),
        pytest.param(ALL, "y.sum().backward()", marks=pytest.mark.slow),
        pytest.param(DEFAULTS, "del y", marks=pytest.mark.slow),
        pytest.param(DEFAULTS, "raise SystemExit", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_while_tensors_are_swapped_ends_cleanly(options, last, forked):
    done = forked.run(ENDS.format(options=options, last=last))
    assert (done.returncode, done.stderr) == (0, "")
