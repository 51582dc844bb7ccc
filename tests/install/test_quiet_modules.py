"""Modules in which no tensor leaves run without the hooks, and nothing else changes by that."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import cswap
from cswap.engine.saved.rest import Rest
from cswap.hooks import HookPair

LEARN = [0, 1, 2, 3, 14, 15, 33, 34]
"""Calls of a model that learn, of the first STEPS."""

STEPS = 36
"""Of training, after which many calls do not learn."""
LARGE = 1 << 40


class Block(nn.Module):
    """A residual block with a norm, two products and dropout."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        first, second = nn.Linear(width, width), nn.Linear(width, width)
        self.body = nn.Sequential(first, nn.GELU(), second, nn.Dropout(0.2))

    def forward(self, x):
        return x + self.body(self.norm(x))


class Net(nn.Module):
    """Blocks, of which the first ones save less than the last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.small = nn.Sequential(Block(4), Block(4))
        self.wide = nn.Linear(4, 64)
        self.large = nn.Sequential(Block(64), Block(64))

    def forward(self, x):
        return self.large(self.wide(self.small(x)))


class Training:
    """A model, and steps of its training."""

    def __init__(self, model=None):
        self.model: Any = Net() if model is None else model
        self.n_steps = 0

    def step(self, rows=16):
        torch.manual_seed(100 + self.n_steps)
        self.n_steps += 1
        self.model.zero_grad()
        self.model(torch.randn(rows, 4)).square().mean().backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def same_bits(mine, its):
    return all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


@pytest.fixture
def install():
    handles = []

    def make(model, **options):
        options = {"min_bytes": 1024, "workers": 0, **options}
        handles.append(cswap.install(model, **options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.remove()


@pytest.fixture
def packs(monkeypatch):
    """How many tensors came to the pack hook, by their number of elements."""
    counts: Counter[int] = Counter()
    pack = HookPair.pack

    def counted(pair, tensor):
        counts[tensor.numel()] += 1
        return pack(pair, tensor)

    monkeypatch.setattr(HookPair, "pack", counted)
    return counts


def noting(seen):
    """Hooks that note the tensors' sizes."""

    def pack(x):
        seen.append(x.numel())
        return x.detach()

    return saved_tensors_hooks(pack, lambda x: x)


def hooks_are_off():
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def settle(training, packs=None, **options):
    """Train until the next step does not learn."""
    for _ in range(STEPS):
        training.step(**options)
    if packs is not None:
        packs.clear()


def test_where_nothing_leaves_no_tensor_comes_to_the_hooks(install, packs):
    training, plain = Training(), Training()
    install(training.model, min_bytes=LARGE)
    counts = []
    for _ in range(STEPS):
        packs.clear()
        assert same_bits(training.step(), plain.step())
        counts.append(packs.total())
    learned = counts[0]
    assert learned > 30
    assert [n for n, count in enumerate(counts) if count == learned] == LEARN
    later = [count for n, count in enumerate(counts) if n not in LEARN]
    assert set(later) == {later[0]}
    assert later[0] < learned / 10  # the loss is no module


@pytest.mark.parametrize(
    "options",
    [{"codec": "raw", "remat": False}, {"min_bytes": LARGE}, {"codec": "zvc"}, {"remat": False}],
)
def test_the_counts_are_those_of_steps_with_all_hooks(install, monkeypatch, packs, options):
    def trained():
        training = Training()
        handle = install(training.model, **options)
        bits = [training.step() for _ in range(STEPS)]
        stats = handle.stats
        seen = packs.total()
        packs.clear()
        codecs = {name: (c.count, c.raw, c.encoded) for name, c in stats.by_codec.items()}
        kept = stats.kept_by_reason, stats.kept_bytes_by_reason
        return bits, (stats.packed, stats.swapped, stats.deduplicated, kept, codecs), seen

    bits, quiet, seen = trained()
    monkeypatch.setattr("cswap.quiet_modules.QuietModules.run", lambda *_: None)
    plain_bits, loud, all_seen = trained()
    assert quiet == loud
    assert all(map(same_bits, bits, plain_bits))
    assert seen < all_seen


def rested(install, monkeypatch):
    """A training whose large tensors rest for long."""
    monkeypatch.setattr("cswap.engine.sender.Rest", partial(Rest, steps=40))
    training = Training()
    handle = install(training.model, remat=False)
    return training, handle


def test_tensors_that_rest_do_not_come_to_the_hooks(install, monkeypatch, packs):
    training, handle = rested(install, monkeypatch)
    for _ in range(20):
        training.step()
    packs.clear()
    kept = handle.stats.kept_by_reason["does_not_pay"]
    training.step()
    assert packs.total() == 0
    assert handle.stats.kept_by_reason["does_not_pay"] > kept
    for _ in range(19):
        training.step()
    packs.clear()
    for _ in range(3):  # their rest is over
        training.step()
    assert packs[16 * 64]


def test_a_tensor_that_the_limit_no_longer_keeps_ends_its_modules_quiet(install, monkeypatch):
    training, handle = rested(install, monkeypatch)
    packer, limit = handle.engine.packer, handle.engine.advisor.limit
    training.step()
    step = handle.engine._state.order.step
    limit.staying = frozenset({(3, 4096), (4, 4096)})
    assert packer.may_rest(step + 1, frozenset())
    assert packer.may_rest(step + 1, frozenset({(3, 4096)}))
    assert not packer.may_rest(step, frozenset())
    assert not packer.may_rest(step + 1, frozenset({(3, 4096), (5, 4096)}))


def test_positions_go_on_after_tensors_that_rest(install, monkeypatch):
    training, handle = rested(install, monkeypatch)
    order, positions = handle.engine._state.order, []
    for _ in range(30):
        training.step()
        positions.append((order.position, order.step))
    assert [step for _, step in positions] == list(range(positions[0][1], positions[0][1] + 30))
    assert len({position for position, _ in positions}) == 1
    assert positions[0][0] > 4


def test_modules_with_a_tensor_that_leaves_keep_their_hooks(install, packs):
    training = Training()
    install(training.model, remat=False, codec="raw")
    settle(training, packs)
    training.step()
    assert packs[16 * 64]
    assert packs[4] == 0  # statistics of the small norms
    assert packs[64] > 0  # of the large ones


def test_inputs_of_recomputed_tensors_are_seen(install, packs, monkeypatch):
    monkeypatch.setattr("cswap.advisor.advisor.Advisor.recomputes", lambda *_, **__: True)
    training, plain = Training(), Training()
    handle = install(training.model, slowdown=1e6)
    totals = [0]
    for _ in range(STEPS):
        assert same_bits(training.step(), plain.step())
        totals.append(handle.stats.by_codec["remat"].count)
    counts = [after - before for before, after in pairwise(totals)]
    assert counts[-1] > 0
    assert set(counts[2:]) == {counts[-1]}
    assert packs[4]
    packs.clear()
    training.step()
    assert not packs[4]  # the first blocks are quiet


class OuterProduct(nn.Module):
    """Saves two small tensors, of which its large result is computed again."""

    def __init__(self):
        super().__init__()
        self.column = nn.Parameter(torch.randn(64, 1))

    def forward(self, x):
        return (x * 2.0) * (self.column * 3.0)


class Around(nn.Module):
    """A module around another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_small_inputs_of_recomputed_tensors_are_seen(install, packs, monkeypatch):
    monkeypatch.setattr("cswap.advisor.advisor.Advisor.recomputes", lambda *_, **__: True)
    model = nn.Sequential(nn.Flatten(0), Around(OuterProduct()), nn.GELU(), Around(nn.Tanh()))
    training = Training(model)
    handle = install(model, slowdown=1e6)
    totals = [0]
    for _ in range(STEPS):
        training.step()
        totals.append(handle.stats.by_codec["remat"].count)
    assert {after - before for before, after in pairwise(totals)} == {1}


@pytest.mark.parametrize("starts", [False, True])
def test_a_module_that_saves_other_tensors_in_turns_is_not_quiet(install, starts):
    class InTurns(nn.Module):
        even = False

        def forward(self, x):
            self.even = not self.even
            return (x.repeat(1, 64).sin() if self.even else x.sin()).sum(1)

    training = Training(nn.Sequential(nn.Linear(4, 4), InTurns()))
    training.model[1].even = starts
    handle = install(training.model, remat=False, codec="raw")
    for n in range(3 * STEPS):
        before = handle.stats.swapped
        training.step()
        assert handle.stats.swapped - before == (n + 1 + starts) % 2


def test_after_another_tensor_hooks_stay_on(install, packs):
    class Extra(nn.Module):
        extra = False

        def forward(self, x):
            for _ in range(1 + self.extra):
                x = x + x.repeat(1, 64).sin().sum()
            return x

    training = Training(nn.Sequential(nn.Linear(4, 4), Extra(), Net()))
    handle = install(training.model, remat=False, codec="raw")
    settle(training, packs)
    before = handle.stats.swapped
    training.step()
    quiet, swapped = packs[4], handle.stats.swapped - before
    packs.clear()
    training.model[1].extra = True
    training.step()
    assert packs[4] > quiet
    assert handle.stats.swapped - before == 2 * swapped + 1


def test_a_module_that_was_left_out_has_to_be_learned_again(install, packs):
    class LeavesOut(Net):
        all = True

        def forward(self, x):
            return super().forward(x) if self.all else self.large(self.wide(x))

    training = Training(LeavesOut())
    install(training.model, min_bytes=LARGE)
    settle(training)
    training.model.all = False
    for _ in range(17):  # of which one learns
        training.step()
    training.model.all = True
    packs.clear()
    training.step()
    assert packs[4]


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


@pytest.mark.parametrize("grow_at", [2, 5, 12])
def test_a_larger_batch_is_seen_at_once(install, grow_at):
    training = Training()
    handle = install(training.model, remat=False, codec="raw", min_bytes=16 * 64 * 4 + 1)
    settle(training)
    for n in range(13):
        before = handle.stats.swapped
        training.step(rows=32 if n == grow_at else 16)
        assert (handle.stats.swapped > before) is (n == grow_at)


def test_another_mode_or_dtype_is_seen_at_once(install, packs):
    training = Training()
    install(training.model, min_bytes=LARGE)
    settle(training, packs)
    training.model.large.eval()
    training.step()
    assert packs[64]
    assert not packs[4]
    packs.clear()
    with torch.autocast("cpu", torch.bfloat16):
        training.model.large.train()
        training.step()
    assert packs[16 * 64]


def test_a_module_that_is_called_twice_is_not_quiet(install, packs):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.again, self.once = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.once(self.again(self.again(x)))

    training = Training(Twice())
    install(training.model, min_bytes=LARGE)
    settle(training, packs)
    training.step()
    assert packs[16 * 4] == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
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


def test_hooks_of_others_get_the_tensors_that_they_got_before(install):
    training = Training()
    handle = install(training.model, min_bytes=LARGE)
    settle(training)
    outer: list[int] = []
    inner: list[int] = []

    forward = training.model.large.forward

    def under_hooks(x):
        with noting(inner):
            return forward(x)

    before = handle.stats.packed
    training.step()
    packed = handle.stats.packed - before
    with noting(outer):
        training.step()
    assert len(outer) == 1  # of the loss
    assert handle.stats.packed - before == 2 * packed
    training.model.large.forward = under_hooks
    training.step()
    assert inner
    assert handle.stats.packed - before == 3 * packed - len(inner)


def test_a_checkpointed_module_inside(install):
    class Checkpointed(Net):
        def forward(self, x):
            return self.large(self.wide(checkpoint(self.small, x, use_reentrant=False)))

    training, plain = Training(Checkpointed()), Training(Checkpointed())
    install(training.model)
    for _ in range(STEPS):
        assert same_bits(training.step(), plain.step())


def test_a_change_in_place_raises_in_a_quiet_module(install):
    class Changes(nn.Module):
        changes = False

        def forward(self, x):
            y = torch.sigmoid(x)
            if self.changes:
                y.add_(1.0)
            return y * 2.0

    training = Training(nn.Sequential(nn.Linear(4, 4), Changes()))
    install(training.model, min_bytes=LARGE)
    settle(training)
    training.model[1].changes = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        training.step()


def test_a_forward_without_gradients_teaches_nothing(install, packs):
    training = Training()
    install(training.model, min_bytes=LARGE)
    settle(training, packs)
    training.step()
    quiet = packs.total()
    with torch.no_grad():
        for _ in range(STEPS):
            training.model(torch.randn(16, 4))
    packs.clear()
    training.step()
    assert packs.total() == quiet


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


def test_a_new_plan_is_learned_anew(install, packs):
    training = Training()
    handle = install(training.model, min_bytes=LARGE)
    settle(training, packs)
    training.step()
    quiet = packs.total()
    packs.clear()
    handle.engine.renumber()
    training.step()
    assert packs.total() > 2 * quiet


def test_autograd_does_not_hold_what_a_step_has_learned(install):
    training = Training()
    handle = install(training.model, remat=False, codec="raw")
    handle_bytes = []
    for _ in range(2):
        loss = training.model(torch.randn(16, 4)).square().mean()
        handle.engine.synchronize()
        handle_bytes.append(handle.stats.device_bytes)
        del loss
    assert handle_bytes == [0, 0]


@pytest.mark.parametrize("period", [3, 5, 17, 34])
def test_a_module_that_has_changed_is_quiet_later_and_later(install, period):
    class Now(nn.Module):
        large, n_calls = 0, 0

        def forward(self, x):
            self.n_calls += 1
            return (x.repeat(1, 64).sin() if self.n_calls % period == 0 else x.sin()).sum(1)

    training = Training(nn.Sequential(nn.Linear(4, 4), Now()))
    handle = install(training.model, remat=False, codec="raw")
    missed = []
    for n in range(1, 600):
        before = handle.stats.swapped
        training.step()
        if n % period == 0:
            missed.append(handle.stats.swapped == before)
    assert sum(missed) < len(missed) / 2


@pytest.mark.parametrize("how", ["parameter", "no_grad"])
def test_a_module_that_begins_to_train_is_seen_at_once(install, how):
    class MayFreeze(Net):
        frozen = True

        def forward(self, x):
            x = self.wide(self.small(x).detach())
            with torch.set_grad_enabled(not (how == "no_grad" and self.frozen)):
                return self.large(x)

    training = Training(MayFreeze())
    if how == "parameter":
        training.model.large.requires_grad_(False)
        training.model.wide.requires_grad_(False)
    handle = install(training.model, remat=False, codec="raw")
    for _ in range(STEPS):
        with torch.enable_grad():
            loss = training.model(torch.randn(16, 4)).square().mean()
        if loss.requires_grad:
            loss.backward()
    before = handle.stats.swapped
    training.model.frozen = False
    training.model.requires_grad_(True)
    training.step()
    assert handle.stats.swapped - before >= 8


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


def test_graphs_inside_of_a_forward_are_freed_in_a_call_that_learns(install):
    class Inner(Net):
        alive = 0

        def forward(self, x):
            storages: list[StorageWeakRef] = []
            self.alive = 0
            for _ in range(8):
                y = self.wide(x.detach())
                torch.autograd.grad((y.sin() * y).sum(), [self.wide.weight])
                storages.append(StorageWeakRef(y.untyped_storage()))
                del y
                alive = sum(not storage.expired() for storage in storages)
                self.alive = max(self.alive, alive)
            return super().forward(x)

    training = Training(Inner())
    install(training.model, min_bytes=LARGE)
    for _ in range(STEPS):
        training.step()
        assert training.model.alive == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("min_bytes", [0, LARGE])
def test_a_compiled_module_inside_is_compiled_once(install, min_bytes):
    torch._dynamo.reset()
    training, plain = Training(), Training()
    training.model.large[0].compile(fullgraph=True, backend="eager")
    install(training.model, min_bytes=min_bytes)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(STEPS):
            assert same_bits(training.step(), plain.step())
    assert hooks_are_off()
