"""Quiet modules beside errors, and beside hooks, threads and graphs of others."""

from __future__ import annotations

import copy
import threading
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cswap.engine.order import looks
from tests.quiet_modules.training import (
    LARGE,
    STEPS,
    Net,
    Training,
    hooks_are_off,
    noting,
    same_bits,
    settle,
)


def test_an_error_before_our_hook_leaves_out_the_modules_around_it(install, packs):
    class Catches(Net):
        def forward(self, x):
            with suppress(ValueError):
                self.small(x)
            return super().forward(x)

    def fails(*_):
        raise ValueError("of the test")

    training = Training(Catches())
    install(training.model, min_bytes=LARGE)
    blocked = training.model.small[1].norm.register_forward_pre_hook(fails, prepend=True)
    with pytest.raises(ValueError, match="of the test"):
        training.step()
    blocked.remove()
    plain = Training(copy.deepcopy(training.model))
    plain.n_steps = training.n_steps
    for _ in range(STEPS):
        assert same_bits(training.step(), plain.step())
    assert hooks_are_off()


@pytest.mark.parametrize(
    "error", [ValueError, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)]
)
def test_an_error_in_a_quiet_module_leaves_no_hooks(install, packs, error):
    class Raises(nn.Module):
        error: type[BaseException] | None = None
        off = False

        def forward(self, x):
            self.off = hooks_are_off()
            if self.error is not None:
                raise self.error
            return x

    class WithRaises(Net):
        def __init__(self):
            super().__init__()
            self.small.append(Raises())

    training, plain = Training(WithRaises()), Training(WithRaises())
    install(training.model, min_bytes=LARGE)
    for _ in range(STEPS):
        training.step(), plain.step()
    inner = training.model.small[-1]
    inner.error = error
    with pytest.raises(error):
        training.step()
    assert inner.off
    assert hooks_are_off()
    inner.error, training.n_steps = None, plain.n_steps
    plain.model.load_state_dict(training.model.state_dict())
    for _ in range(STEPS):
        assert same_bits(training.step(), plain.step())
    assert hooks_are_off()


def test_an_error_that_the_model_catches_puts_the_hooks_back(install, packs):
    class Fails(nn.Module):
        fails = False

        def forward(self, x):
            if self.fails:
                raise ValueError
            return x

    class Catches(Net):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), Fails())

        def forward(self, x):
            with suppress(ValueError):
                x = self.inner(x)
            return super().forward(x)

    training = Training(Catches())
    handle = install(training.model, remat=False, codec="raw")
    settle(training)
    before = handle.stats.swapped
    training.step()
    swapped = handle.stats.swapped - before
    assert swapped
    training.model.inner[1].fails = True
    training.step()
    assert handle.stats.swapped - before == 2 * swapped


def test_hooks_of_others_get_the_tensors_that_they_got_before(install, monkeypatch, packs):
    monkeypatch.setattr(looks, "EVERY", STEPS // 2)
    training = Training()
    install(training.model, min_bytes=LARGE)
    training.step()
    everything = packs.total()
    settle(training, packs)
    outer: list[int] = []
    inner: list[int] = []

    forward = training.model.large.forward

    def under_hooks(x):
        with noting(inner):
            return forward(x)

    training.step()
    assert packs.total() < everything / 10
    packs.clear()
    with noting(outer):
        training.step()
    assert len(outer) == 1  # of the loss
    assert packs.total() == everything
    training.model.large.forward = under_hooks
    training.step()
    alone: list[int] = []
    with noting(alone):
        forward(torch.randn(16, 64))
    assert inner == alone
    settle(training, packs)
    inner.clear()
    training.step()
    assert inner == alone
    assert packs.total() < everything / 10


def test_a_checkpointed_module_inside(install):
    class Checkpointed(Net):
        def forward(self, x):
            return self.large(self.wide(checkpoint(self.small, x, use_reentrant=False)))

    training, plain = Training(Checkpointed()), Training(Checkpointed())
    install(training.model)
    for _ in range(STEPS):
        assert same_bits(training.step(), plain.step())


def test_another_thread_keeps_all_hooks(install, packs):
    training = Training()
    install(training.model, min_bytes=LARGE)
    settle(training, packs)
    training.step()
    quiet = packs.total()
    packs.clear()
    thread = threading.Thread(target=training.step)
    thread.start()
    thread.join()
    assert packs.total() > 2 * quiet


def assert_each_step_shows_as_many(training, seen):
    counts = set()
    for _ in range(STEPS):
        del seen[:]
        training.step()
        counts.add(len(seen))
        assert hooks_are_off()
    assert len(counts) == 1


def test_hooks_that_begin_in_a_module_and_end_after_it(install):
    training = Training()
    install(training.model, min_bytes=LARGE)
    seen: list[int] = []
    hooks = noting(seen)
    inner = training.model.small[0]
    inner.register_forward_pre_hook(lambda *_: hooks.__enter__())
    inner.register_forward_hook(lambda *_: hooks.__exit__())
    assert_each_step_shows_as_many(training, seen)


def test_hooks_that_begin_in_one_module_and_end_in_another(install):
    seen: list[int] = []
    hooks = noting(seen)

    class Begin(nn.Module):
        def forward(self, x):
            hooks.__enter__()
            return x

    class End(nn.Module):
        def forward(self, x):
            hooks.__exit__()
            return x

    training = Training(nn.Sequential(Begin(), nn.Linear(4, 4), nn.Tanh(), End(), Net()))
    install(training.model, min_bytes=LARGE)
    assert_each_step_shows_as_many(training, seen)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("min_bytes", [pytest.param(0, marks=pytest.mark.slow), LARGE])
def test_a_compiled_module_inside_is_compiled_once(install, min_bytes):
    torch._dynamo.reset()
    training, plain = Training(), Training()
    training.model.large[0].compile(fullgraph=True, backend="eager")
    install(training.model, min_bytes=min_bytes)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(STEPS):
            assert same_bits(training.step(), plain.step())
    assert hooks_are_off()
