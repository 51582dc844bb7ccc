"""Which ways to hold a tensor the explored steps of a goal find, and plans that can be kept."""

from __future__ import annotations

import pytest
import torch

from cswap.fit.exploration import EXPLORED
from cswap.fit.problem import Problem
from cswap.fit.saved import Key, Saved, Way

STEPS = 12


@pytest.fixture
def explored(make_training, sizes, install):
    """A training of residual blocks with batch norms under a goal, after its first plan."""

    def make(share):
        mine, plain = make_training("convolutions"), make_training("convolutions")
        resident, saved = sizes(mine)
        handle = install(mine.model, fit=int(resident + share * saved))
        for n in range(STEPS):
            for one in (mine, plain):
                torch.manual_seed(n)
                one.gradients = one.step()
            assert all(map(torch.equal, mine.gradients, plain.gradients))
            if n == EXPLORED:
                assert handle.goal.phase == "obeying"
        return mine, handle

    return make


def chain_of(handle, scope):
    """Whether the first tensor that a module saves can be computed again, and what that needs."""
    saved = handle._fit._problem.saved
    one = next(s for s in saved if s.names[0].scope == scope)
    return one.recomputable, {need.name.scope for need in one.needs}


def test_sums_of_blocks_can_be_computed_again_where_convolutions_need_not(explored):
    _, handle = explored(0.8)
    for block in ("2", "3"):
        may_run_again, needs = chain_of(handle, block)
        assert may_run_again
        assert f"{block}.body.4" in needs  # the sum's norm
    assert "convolution" not in handle.goal.actions


@pytest.mark.parametrize(
    "share", [0.9, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.8, 0.65, 0.5)), 0.4]
)
def test_a_plan_of_these_ways_can_be_kept(explored, share):
    mine, handle = explored(share)
    fit = handle._fit
    assert fit._plan.counts["remat"] > 0
    assert share < 0.8 or fit._problem.too_deep
    seen = []
    for _ in range(3):
        mine.step()
        seen.append(fit._chooser.step.unknown_bytes)
    assert seen == [0, 0, 0]
    assert handle.goal.held
    assert handle.stats.fallbacks == 0


@pytest.mark.parametrize("selectors", [{"exclude": "op:conv2d"}, {"include": "op:batch_norm"}])
def test_what_operators_keep_is_in_the_plan(make_training, install, selectors):
    mine, plain = make_training("convolutions"), make_training("convolutions")
    handle = install(mine.model, fit="min", slowdown=10, **selectors)
    for n in range(STEPS):
        for one in (mine, plain):
            torch.manual_seed(n)
            one.gradients = one.step()
        assert all(map(torch.equal, mine.gradients, plain.gradients))
    goal = handle.goal
    assert goal.phase == "obeying"
    assert goal.measured_bytes < 1.05 * goal.predicted_bytes
    assert handle.stats.kept_by_reason["excluded"] > 0


def step_of(*tensors):
    """A step's tensors [(MiB, kind)]: "product" and "again" run again, "no" has no such way."""
    found = []
    for n, (mib, kind) in enumerate(tensors):
        nbytes = int(mib * (1 << 20))
        ways = [Way("keep", nbytes, 0.0), Way("zvc", nbytes * 7 // 8, 1e-3)]
        ways += [Way("remat", 0, 1e-3)] if kind != "no" else []
        key = Key(f"m{n}", torch.float32, 0)
        use = 2 * len(tensors) - n
        product = kind == "product"
        found.append(Saved((key,), nbytes, tuple(ways), n, use, use, product=product))
    return Problem(found)


SUM, NORM, LARGE, MASK = (0.5, "product"), (0.5, "again"), (2.0, "no"), (0.1, "no")


@pytest.mark.parametrize(
    ("tensors", "stored"),
    [
        ((SUM, NORM, LARGE), {"m0"}),  # the sum hides the product after its norm
        ((SUM, NORM, (2.0, "product"), NORM, MASK), set()),  # nobody computes a mask
        ((SUM, (0.4, "no"), NORM), set()),
        ((SUM, NORM), set()),
    ],
)
def test_a_goal_nearly_out_of_reach_stores_what_hides_a_larger_way(tensors, stored):
    found = step_of(*tensors).in_the_way(room_bytes=1.0, before=None)
    assert {key.scope for key in found} == stored


def test_where_there_is_room_all_products_are_stored():
    found = step_of(SUM, NORM, LARGE, (2.0, "product")).in_the_way(1e9, None)
    assert {key.scope for key in found} == {"m0", "m3"}
