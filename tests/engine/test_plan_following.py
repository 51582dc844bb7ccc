"""The engine does what a plan says, and notices when the step is another."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import cswap
from cswap.engine.order.plan_follower import PlanFollower
from cswap.engine.replay.again_slot import AgainSlot
from cswap.engine.saved import reclaim
from cswap.engine.transfer import device_lanes
from cswap.plan import planner
from cswap.plan.hardware import load_hardware
from cswap.plan.measure import measure
from cswap.plan.policies import home
from cswap.plan.simulate import smallest_feasible_budget
from cswap.plan.simulator.lifetimes import live_bytes
from cswap.recompute import modules_to_recompute
from cswap.schema.plan import Action, Decision, Plan
from tests.devices.sim import SimDevice


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.act, self.down = (
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def make_model(width=64, n=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(n)))


X = torch.randn(128, 64)


def gradients(model, x=X):
    model.zero_grad()
    model(x).square().sum().backward()
    return [torch.clone(p.grad) for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def saved_by(model, x=X, **options):
    """What the engine sees of a step: (module, bytes) by position."""
    with cswap.install(model, min_bytes=0, **options) as handle:
        gradients(model, x)
    found = handle.engine.explain()
    return [(e.site.scope, e.profile.nbytes) for e in found if e.profile is not None]


def plan_of(model, action="swap", x=X, **options):
    return {
        position: Decision(action, module=module, nbytes=nbytes, **options)
        for position, (module, nbytes) in enumerate(saved_by(model, x))
    }


def test_keep_and_swap_are_obeyed_and_positions_do_not_shift():
    model = make_model()
    expected = gradients(model)
    decisions = plan_of(model, codec="zvc")
    kept = [p for p, d in decisions.items() if d.module.endswith("act")]  # saved by `down`, too
    for position in kept:
        old = decisions[position]
        decisions[position] = Decision("keep", module=old.module, nbytes=old.nbytes)
    with cswap.install(model, plan=Plan(decisions), min_bytes=0) as handle:
        for _ in range(3):
            assert equal(gradients(model), expected)
    assert len(kept) == 4
    assert handle.stats.kept_by_reason["plan"] == 3 * len(kept)
    assert handle.stats.swapped == 3 * (len(decisions) - len(kept))
    assert handle.stats.fallbacks == 0


@pytest.mark.parametrize("other", ["shape", "model", "more"])
def test_another_step_than_planned_ends_the_plan_with_one_notice(other, caplog):
    model = make_model()
    plan, x = Plan(plan_of(model, codec="rle")), X
    if other == "shape":
        x = torch.randn(96, 64)
    elif other == "model":
        model = make_model(width=64, n=4)
        model[0] = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    else:
        model = make_model(n=5)
    expected = gradients(model, x)
    with (
        caplog.at_level(logging.WARNING, "cswap"),
        cswap.install(model, plan=plan, min_bytes=0) as handle,
    ):
        for _ in range(3):
            assert equal(gradients(model, x), expected)
    assert handle.stats.fallbacks_by_reason == {"plan": 1}
    assert caplog.text.count("what the plan expects") == 1
    assert all(e.codec != "rle" for e in handle.engine.explain())


def test_a_module_of_which_all_is_to_be_recomputed_is():
    model = make_model()
    expected = gradients(model)
    forwards = [module.forward for module in model]
    decisions = plan_of(model, codec="raw")
    for position, old in decisions.items():
        if old.module.startswith(("1.", "2.")):
            decisions[position] = Decision("recompute", module=old.module, nbytes=old.nbytes)
    plan = Plan(decisions)
    recomputed = modules_to_recompute(plan, model)
    assert set(recomputed) == {"1", "2"}
    with cswap.install(model, plan=plan, min_bytes=0) as handle:
        runs = []
        model[1].up.register_forward_hook(lambda *_: runs.append(1))
        for _ in range(3):
            assert equal(gradients(model), expected)
        assert len(runs) == 6  # in forward, and again in backward
    seen = len(decisions) - sum(map(len, recomputed.values()))
    assert 3 * seen <= handle.stats.swapped <= 3 * (seen + 2)
    assert handle.stats.fallbacks == 0
    assert [module.forward for module in model] == forwards
    assert equal(gradients(model), expected)


class Mlp(nn.Module):
    """Of a norm, a product and GELU, which the engine can compute again one by one."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down = nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


@pytest.mark.parametrize("policy", ["home", "capuchin"])
def test_single_tensors_of_a_published_plan_are_computed_again(policy, monkeypatch):
    monkeypatch.setattr(home, "EVALUATIONS", 400)
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp(64) for _ in range(4)))
    expected = gradients(model)
    trace = measure(
        model, X, lambda out: out.square().sum(),
        min_bytes=1024, warm_up=0, repeats=1, profiles=False,
    )  # fmt: skip
    # Measured times would make another plan in each run.
    operators = tuple(replace(operator, duration_s=1e-4) for operator in trace.operators)
    trace = replace(trace, operators=operators)
    rates = load_hardware("v100-pcie3")
    slow = replace(rates, d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6)
    budget = (smallest_feasible_budget(trace, slow) + max(live_bytes(trace))) // 2
    plan = planner.plan(trace, slow, budget, policy, recompute=True)
    counts = Counter(d.action for d in plan.decisions.values())
    assert counts["recompute"] > 0
    assert modules_to_recompute(plan, model) == {}
    with cswap.install(model, plan=plan, min_bytes=1024) as handle:
        for _ in range(3):
            assert equal(gradients(model), expected)
        assert handle.engine._state.follower.drift == ""
    stats = handle.stats
    assert stats.fallbacks == 0
    assert stats.by_codec["remat"].count == 3 * counts["recompute"]
    assert stats.swapped == 3 * (counts["recompute"] + counts["swap"])
    assert stats.kept_by_reason.get("plan", 0) == 3 * counts["keep"]


@pytest.mark.parametrize("remat", [True, False])
def test_a_tensor_that_no_chain_makes_is_swapped_and_counted(remat, caplog):
    model = make_model()
    expected = gradients(model)
    decisions = {p: replace(d, module="") for p, d in plan_of(model, action="recompute").items()}
    options = {"min_bytes": 0, "codec": "raw", "remat": remat, "budget": None}
    with cswap.install(model, plan=Plan(decisions), **options) as handle:
        for _ in range(2):
            assert equal(gradients(model), expected)
    stats = handle.stats
    again = stats.by_codec["remat"].count if remat else 0
    assert (again > 0) is remat  # the input of the model is made by nothing
    # Once for each: in the second step, it goes by a slot.
    assert stats.fallbacks_by_reason == {"plan:recompute": len(decisions) - again // 2}
    assert stats.by_codec["raw"].count == 2 * len(decisions) - again
    assert caplog.text.count("no chain of operators") == 1


@pytest.mark.parametrize("options", [{}, {"keep_last": 1}, {"budget": "1MiB"}])
def test_a_plan_computes_again_beside_a_window(options):
    model = make_model()
    expected = gradients(model)
    decisions = {p: replace(d, module="") for p, d in plan_of(model, action="recompute").items()}
    options = {"min_bytes": 0, "codec": "raw", **options}
    with cswap.install(model, plan=Plan(decisions), **options) as handle:
        for _ in range(2):
            assert equal(gradients(model), expected)
        assert handle.stats.by_codec["remat"].count > 0


@pytest.mark.parametrize(("prefetch", "hit"), [(0, False), (2, True), (None, True)])
def test_swap_ins_start_when_the_plan_says(prefetch, hit, monkeypatch):
    model = make_model(n=8)
    plan = Plan(plan_of(model, codec="raw", prefetch=prefetch))
    monkeypatch.setattr(device_lanes, "cpu_device", lambda: SimDevice(0))
    with cswap.install(model, plan=plan, min_bytes=0) as handle:
        reclaim._reclaimers.discard(handle.engine._state.reclaimer)  # the device is for one thread
        for _ in range(4):
            model.zero_grad()
            loss = model(X).square().sum()
            handle.engine.synchronize()
            loss.backward()
    assert handle.stats.fallbacks == 0
    assert (handle.stats.prefetch_hits > 0) is hit


def test_without_sizes_a_plan_goes_by_positions():
    follower = PlanFollower(Plan({0: Decision("keep"), 5: Decision("swap", "zvc")}))
    assert follower.find(3, "anywhere", 7) is None
    found = follower.find(0, "anywhere", 7)
    assert found is not None
    assert found.decision == Decision("keep")
    assert follower.drift == ""


def test_excluded_operators_stay_whatever_the_plan_says():
    model = make_model()
    expected = gradients(model)
    plan = Plan(plan_of(model, codec="zvc"))
    with cswap.install(model, plan=plan, min_bytes=0, exclude="op:relu") as handle:
        for n in range(1, 4):
            assert equal(gradients(model), expected)
            assert handle.stats.kept_by_reason["excluded"] == 4 * n
    assert handle.stats.swapped > 0
    assert "plan" not in handle.stats.fallbacks_by_reason  # positions are those of the plan


def test_slots_take_what_a_plan_swaps_and_computes_again():
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp(64) for _ in range(4)))
    expected = gradients(model)
    actions: dict[str, Action] = {
        "0.down": "recompute",
        "1.down": "recompute",
        "2.down": "keep",
        "3.up": "keep",
    }
    decisions = {
        position: Decision(actions.get(module, "swap"), "raw", nbytes=nbytes)
        for position, (module, nbytes) in enumerate(saved_by(model, remat=False))
    }
    with cswap.install(model, plan=Plan(decisions), min_bytes=0) as handle:
        steps = []
        for _ in range(5):
            before = handle.stats
            again = before.by_codec["remat"].count if "remat" in before.by_codec else 0
            assert equal(gradients(model), expected)
            after = handle.stats
            steps.append(
                (
                    after.swapped - before.swapped,
                    after.kept_by_reason["plan"] - before.kept_by_reason.get("plan", 0),
                    after.by_codec["remat"].count - again,
                )
            )
        model(X)
        book = handle.engine.packer.book
        assert handle.engine.goes_by_slots
        assert book.slots is not None
        assert None not in book.slots  # each has a slot that takes tensors, or is one that stays
        assert sum(isinstance(slot, AgainSlot) for slot in book.slots) == 2
    assert len(set(steps)) == 1
    assert min(steps[0]) > 0
    assert handle.stats.fallbacks_by_reason.keys() <= {"plan:recompute"}


@pytest.mark.parametrize("step", [1, 2, 4])
def test_another_batch_in_a_step_of_slots_ends_the_plan(step, caplog):
    model = make_model()
    plan = Plan(plan_of(model, codec="rle"))
    batches = [X] * step + [torch.randn(96, 64)] * 2 + [X]
    expected = [gradients(model, x) for x in batches]
    with (
        caplog.at_level(logging.WARNING, "cswap"),
        cswap.install(model, plan=plan, min_bytes=0) as handle,
    ):
        for x, gradient in zip(batches, expected, strict=True):
            before = handle.stats.by_codec.get("rle")
            assert equal(gradients(model, x), gradient)
    assert handle.stats.fallbacks_by_reason == {"plan": 1}
    assert caplog.text.count("what the plan expects") == 1
    assert handle.stats.by_codec.get("rle") == before  # in the last step, none goes as planned


class Grown(nn.Module):
    """One operator more, at the end."""

    def __init__(self, model):
        super().__init__()
        self.model, self.grows = model, False

    def forward(self, x):
        y = self.model(x)
        return y.tanh().sin().cos() if self.grows else y.tanh()


def test_what_slots_have_learned_from_a_plan_ends_with_it():
    model = Grown(make_model())
    decisions = plan_of(model, codec="rle")
    decisions |= {n: replace(decisions[n], action="keep") for n in (1, 2)}
    with cswap.install(model, plan=Plan(decisions), min_bytes=0) as handle:
        for _ in range(3):
            gradients(model)
        model.grows = True
        gradients(model)
        before = handle.stats
        assert before.fallbacks_by_reason == {"plan": 1}
        assert before.kept_by_reason["plan"] == 4 * 2
        gradients(model)
        assert handle.stats.by_codec["rle"] == before.by_codec["rle"]
        assert handle.stats.kept_by_reason["plan"] == before.kept_by_reason["plan"]


def test_a_tensor_is_found_after_others_that_slots_have_taken():
    plan = Plan({n: Decision("keep", nbytes=n % 3) for n in range(9)})
    follower = PlanFollower(plan)
    decisions = []
    for asked in (range(9), (0, 4, 5), (8,), (3, 7)):
        follower.begin_step()
        decisions.append([follower.find(n, "", n % 3) for n in asked])
    assert [[p.decision.nbytes for p in found if p] for found in decisions] == [
        [n % 3 for n in asked] for asked in (range(9), (0, 4, 5), (8,), (3, 7))
    ]
    assert follower.drift == ""
    follower.begin_step()
    assert follower.find(4, "m", 2) is None
    assert "tensor 4 of the step, 2 bytes saved in 'm'" in follower.drift


def test_a_distance_counts_the_tensors_that_are_swapped():
    swap, keep = Decision("swap", prefetch=2), Decision("keep")
    follower = PlanFollower(Plan({0: swap, 1: keep, 2: swap, 5: swap, 6: Decision("swap")}))
    found = [follower.find(n, "", 4) for n in (0, 2, 5, 6)]
    assert [p[1:] for p in found if p] == [
        (2, 1, False), (2, 2, True), (2, 1, True), (16, 0, True)
    ]  # fmt: skip
    assert follower.depth == 16
