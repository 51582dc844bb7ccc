"""From an estimated trace to a plan to an engine that obeys it, and what it then holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cswap
from bench.workloads.saved_bytes import Held, SavedBytes
from bench.workloads.small_models import CnnShape, Gpt, GptShape, VggNet
from cswap.plan.estimate import estimate
from cswap.plan.hardware import Flops, Hardware
from cswap.plan.planner import POLICIES
from cswap.plan.planner import plan as make_plan
from cswap.plan.simulate import simulate, smallest_feasible_budget
from cswap.plan.simulator.lifetimes import live_bytes

MIN_BYTES = 1 << 14
FAST = Hardware("fast link", 1 << 40, {"float32": Flops(1e11, 1e11)}, 1e11, 1e18, 1e18)
"""Swapping on a CPU, in the thread that computes, is over at once."""

ALL_LEAVE = frozenset({"none", "vdnn-all", "vdnn-conv"})
"""Policies that know no budget."""


def loss(output):
    """One that saves nothing: what a loss saves is none of the plan's business."""
    return output.mean()


def setup(name):
    torch.manual_seed(0)
    if name == "cnn":
        return VggNet(CnnShape(dropout=0.0)), torch.randn(16, 1, 32, 32)
    return Gpt(GptShape(n_layers=3, width=64, context=64, dropout=0.0)), torch.randint(256, (4, 64))


def trace_of(model, x):
    return estimate(model, x, loss, hardware=FAST, device="cpu", min_bytes=MIN_BYTES)


def only_saved(trace):
    """The same step, of which nothing but what can be swapped has bytes."""
    tensors = tuple(t if t.saved >= 0 else replace(t, nbytes=0) for t in trace.tensors)
    operators = tuple(replace(o, workspace_bytes=0) for o in trace.operators)
    return replace(trace, tensors=tensors, operators=operators, resident_bytes=0)


def gradients(model, x):
    model.zero_grad()
    loss(model(x)).backward()
    return [torch.clone(p.grad) for p in model.parameters() if p.grad is not None]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["cnn", "gpt"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_peak_is_what_the_simulator_said(name, share):
    model, x = setup(name)
    expected = gradients(model, x)
    trace = only_saved(trace_of(model, x))
    floor, full = smallest_feasible_budget(trace, FAST), max(live_bytes(trace))
    budget = int(floor + share * (full - floor))
    plan = make_plan(trace, FAST, budget, "tvdnn-heuristic", recompute=False)
    simulated = simulate(trace, FAST, plan, budget)
    with cswap.install(model, plan=plan, min_bytes=MIN_BYTES) as handle:
        for _ in range(2):
            found = gradients(model, x)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        saved = SavedBytes(
            [*model.parameters(), *model.buffers()],
            (x, x),
            lambda: Held(device_bytes=handle.stats.device_bytes, host_bytes=0),
        )
        model.probe = saved.watch
        with saved.watch():
            loss(model(x)).backward()
    assert handle.stats.fallbacks == 0
    actions = {d.action for d in plan.decisions.values()}
    assert actions == {"keep", "swap"}
    # The simulator counts what an operator makes from its start, autograd's hooks from its saving:
    # by then what the operator has read may be gone.
    assert 0.85 * simulated.peak_bytes <= saved.curve.peak <= 1.05 * simulated.peak_bytes


class Mixed(torch.nn.Sequential):
    """Runs under autocast."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_copies_of_weights_have_no_place_in_a_plan():
    # Autocast makes them, and they are no tensors that may leave.
    torch.manual_seed(0)
    model, x = Mixed(*(torch.nn.Linear(256, 256) for _ in range(4))), torch.randn(64, 256)
    expected = gradients(model, x)
    trace = trace_of(model, x)
    plan = make_plan(trace, FAST, max(live_bytes(trace)), "vdnn-all", recompute=False)
    with cswap.install(model, plan=plan, min_bytes=MIN_BYTES) as handle:
        for _ in range(3):
            assert all(map(torch.equal, gradients(model, x), expected))
        stats = handle.stats
    assert stats.kept_by_reason["parameter"] == 3 * 3  # the first layer needs none
    assert stats.swapped
    assert not stats.fallbacks, stats.fallbacks_by_reason


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["cnn", "gpt"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_published_plan_gives_the_bits_of_training_without_it(policy, name):
    model, x = setup(name)
    expected = gradients(model, x)
    trace = only_saved(trace_of(model, x))
    floor, full = smallest_feasible_budget(trace, FAST), max(live_bytes(trace))
    budget = full if policy in ALL_LEAVE else int(floor + 0.6 * (full - floor))
    plan = make_plan(trace, FAST, budget, policy, recompute=True, time_limit=0.3)
    actions = {decision.action for decision in plan.decisions.values()}
    assert actions == {"keep"} if policy == "none" else actions != {"keep"}
    with cswap.install(model, plan=plan, min_bytes=MIN_BYTES) as handle:
        for _ in range(3):  # by handles, and by slots
            assert all(map(torch.equal, gradients(model, x), expected))
        stats = handle.stats
    assert not stats.fallbacks_by_reason.get("plan"), "the step was another one than the plan's"
    assert bool(stats.swapped) == (policy != "none")
