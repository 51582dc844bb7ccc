"""Operators that write in place: computing a tensor again takes all that wrote it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from cswap.errors import TraceError
from cswap.plan.estimate import estimate
from cswap.plan.hardware import Hardware, load_hardware
from cswap.plan.measure import measure
from cswap.plan.policy_tools.recompute_cost import chain_s
from cswap.plan.simulate import RECOMPUTE, Simulator, simulate
from cswap.plan.simulator.sections import split
from cswap.schema.plan import Decision, Plan
from cswap.schema.trace import Trace, TraceOperator, TraceTensor

MACHINE = Hardware("test", 1 << 40, {}, 1e12, 1e9, 1e9)


def block(*, inplace):
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=inplace),
        nn.Hardtanh(-1.0, 3.0, inplace=inplace),
        nn.Conv2d(8, 8, 3, padding=1),
    )


def loss(y):
    return y.square().sum()


def traced(*, inplace, model=block):
    x = torch.zeros(16, 8, 32, 32)
    return estimate(model(inplace=inplace), x, loss, hardware="v100-pcie3", min_bytes=1024)


def seconds_of(trace, *names):
    return sum(o.duration_s for o in trace.operators if o.phase == "forward" and o.name in names)


def input_of_last(trace):
    """Position in the arrays of the last convolution's saved input."""
    (last,) = (o for o in trace.operators if o.name == "4.convolution")
    return Simulator(trace, load_hardware("v100-pcie3")).swappable.index(last.inputs[0])


def test_the_estimate_has_every_operator_that_wrote_the_tensor():
    names = {True: ("2.relu_", "3.hardtanh_"), False: ("2.relu", "3.hardtanh")}
    found = {}
    for inplace in (False, True):
        trace = traced(inplace=inplace)
        simulator = Simulator(trace, load_hardware("v100-pcie3"))
        found[inplace] = chain_s(simulator)[input_of_last(trace)]
        own = seconds_of(trace, "1.native_batch_norm", *names[inplace])
        if inplace:
            assert found[True] == pytest.approx(own)
    assert found[True] > 2.5 * seconds_of(traced(inplace=True), "1.native_batch_norm")
    assert found[False] > 0


@pytest.mark.parametrize("made", ["estimated", "measured"])
def test_the_simulator_runs_them_again(made):
    if made == "estimated":
        trace, x = traced(inplace=True), None
    else:
        x = torch.randn(16, 8, 32, 32)
        trace = measure(block(inplace=True), x, loss, warm_up=0, repeats=1, min_bytes=1024)
    simulator = Simulator(trace, MACHINE)
    place = input_of_last(trace)
    plan = Plan({simulator.saved[place]: Decision("recompute")})
    result = simulate(trace, MACHINE, plan)
    again_s = seconds_of(trace, "1.native_batch_norm", "2.relu_", "3.hardtanh_")
    assert again_s > 0
    assert result.step_s == pytest.approx(simulator.compute_s + again_s)
    assert chain_s(simulator)[place] == pytest.approx(again_s)


class Residual(nn.Module):
    """A sum in place reads one tensor and writes another."""

    def __init__(self, *, inplace):
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.third, self.inplace = nn.Conv2d(8, 8, 1, bias=False), inplace

    def forward(self, x):
        x = self.first(x).tanh()
        y = self.second(x)
        return self.third(torch.nn.functional.relu(y.add_(x), inplace=self.inplace))


def test_what_an_operator_only_reads_needs_no_more_of_it():
    trace = traced(inplace=True, model=Residual)
    simulator = Simulator(trace, load_hardware("v100-pcie3"))
    (tanh,) = (o for o in trace.operators if o.name == "tanh")
    (third,) = (o for o in trace.operators if o.name == "third.convolution")
    again_s = dict(zip(simulator.swappable, chain_s(simulator), strict=True))
    # Of the first convolution's output nothing is saved: tanh needs it again.
    assert again_s[tanh.outputs[0]] == pytest.approx(seconds_of(trace, "first.convolution", "tanh"))
    whole = seconds_of(trace, "second.convolution", "add_", "relu_")
    assert again_s[third.inputs[0]] == pytest.approx(whole)


class ThroughViews(nn.Module):
    """Writers that see a part of the tensor, or all of it in another shape."""

    def __init__(self, *, inplace):
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1, bias=False)

    def forward(self, x):
        y = self.norm(x)
        y[:, :4].mul_(2.0)
        y.permute(1, 2, 3, 0).neg_()
        y[:, 4:].zero_()
        y.transpose(0, 1)[1].tanh_()
        return self.last(y)


def test_writers_through_views_count():
    trace = traced(inplace=True, model=ThroughViews)
    simulator = Simulator(trace, load_hardware("v100-pcie3"))
    (last,) = (o for o in trace.operators if o.name == "last.convolution")
    again_s = dict(zip(simulator.swappable, chain_s(simulator), strict=True))
    names = ("norm.native_batch_norm", "mul_", "neg_", "zero_", "tanh_")
    assert names == tuple(o.name for o in trace.operators[1 : trace.operators.index(last)])
    assert again_s[last.inputs[0]] == pytest.approx(seconds_of(trace, *names))


def versions():
    """a (from x), b (from a as it is), a written twice, c (from a), all for backward but a."""
    tensors = (
        TraceTensor(64, "x", role="input", saved=0),
        TraceTensor(64, "a"),
        TraceTensor(64, "b", saved=1),
        TraceTensor(64, "c", saved=2),
    )
    operators = (
        TraceOperator("a", "conv", "forward", 1.0, (0,), (1,)),
        TraceOperator("b", "conv", "forward", 2.0, (1,), (2,)),
        TraceOperator("w1", "activation", "forward", 4.0, (1,), (), writes=(1,)),
        TraceOperator("w2", "activation", "forward", 8.0, (2, 1), (), writes=(1,)),
        TraceOperator("c", "conv", "forward", 16.0, (1,), (3,)),
        TraceOperator("c'", "conv", "backward", 1.0, (3,), ()),
        TraceOperator("b'", "conv", "backward", 1.0, (2,), ()),
        TraceOperator("x'", "conv", "backward", 1.0, (0,), ()),
    )
    return Trace(operators, tensors)


def test_a_reader_needs_the_version_that_it_read():
    simulator = Simulator(versions(), MACHINE)
    # b is alive when c is computed again; b itself is made of a before the writes.
    np.testing.assert_allclose(chain_s(simulator), [np.inf, 3.0, 29.0])
    for position, again_s in ((1, 3.0), (2, 29.0)):
        action = np.zeros(3, np.int8)
        action[position] = RECOMPUTE
        result = simulator.run(action, np.zeros(3, np.int8), simulator.backward)
        assert result.feasible
        assert result.step_s == pytest.approx(simulator.compute_s + again_s)


def test_writes_survive_json_and_sections_and_are_checked():
    trace = versions()
    assert Trace.parse(trace.to_dict()) == trace
    cut, origin = split(trace, {1: 16})
    assert [tuple(origin[t] for t in o.writes) for o in cut.operators][2:4] == [(1,) * 4] * 2
    bad = trace.to_dict()
    bad["operators"][2]["writes"] = [0]
    with pytest.raises(TraceError, match=r"trace\.operators\[2\]\.writes\[0\]=0: is not among"):
        Trace.parse(bad)
