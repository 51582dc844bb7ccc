"""Modules in which a goal's plan lets all tensors stay run without the hooks."""

from __future__ import annotations

import time

import pytest

from tests.quiet_modules.training import STEPS, Training, same_bits


@pytest.mark.parametrize(("slowdown", "leaves"), [(1.0, False), (50.0, True)])
def test_tensors_that_a_plan_keeps_do_not_come_to_the_hooks(install, packs, slowdown, leaves):
    training, plain, counts = Training(), Training(), []
    handle = install(training.model, slowdown=slowdown)
    for _ in range(2 * STEPS):
        packs.clear()
        assert same_bits(training.step(), plain.step())
        counts.append(packs.total())
        planning = handle._fit._planning
        while planning is not None and not planning.done:
            time.sleep(0.001)
    assert handle.goal.phase == "obeying"
    assert (handle.goal.actions.total() > handle.goal.actions["keep"]) == leaves
    fewest = min(counts[STEPS:])  # other steps are looked at
    assert 0 < fewest < counts[0] if leaves else fewest < counts[0] / 10
