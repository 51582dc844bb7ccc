"""Modules in which no tensor leaves run without the hooks, and nothing else changes by that."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cswap.engine.order import looks
from cswap.quiet_modules.quiet_modules import QuietModules
from tests.quiet_modules.training import (
    LARGE,
    STEPS,
    Net,
    Training,
    same_bits,
    settle,
)

pytestmark = pytest.mark.usefixtures("by_price")


@pytest.fixture
def recorded(monkeypatch):
    """A number for each call that was recorded."""
    found: list[int] = []
    end = QuietModules.end

    def noted(quiet, recorder):
        found.append(len(found))
        end(quiet, recorder)

    monkeypatch.setattr(QuietModules, "end", noted)
    return found


def test_where_nothing_leaves_no_tensor_comes_to_the_hooks(install, packs):
    training, plain = Training(), Training()
    install(training.model, min_bytes=LARGE)
    counts = []
    for _ in range(STEPS):
        packs.clear()
        assert same_bits(training.step(), plain.step())
        counts.append(packs.total())
    assert counts[0] == counts[1] > 30  # recorded
    assert set(counts[2:]) == {counts[2]}
    assert counts[2] < counts[0] / 10  # the loss is no module


def test_two_calls_are_recorded_now_and_then(install, monkeypatch, recorded):
    monkeypatch.setattr("cswap.quiet_modules.quiet_modules.EVERY", 20)
    training, at = Training(), []
    install(training.model, remat=False)
    for n in range(50):
        recorded.clear()
        training.step()
        at += [n] if recorded else []
    assert at == [0, 1, 20, 21, 40, 41]


def test_settings_that_change_in_turns_are_recorded_once_each(install, recorded):
    training = Training()
    install(training.model, min_bytes=LARGE)
    for n in range(30):  # as a discriminator is frozen while its generator learns
        training.model.small.requires_grad_(n % 3 > 0)
        training.step()
    assert len(recorded) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "raw", "remat": False},
        {"min_bytes": LARGE},
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({"codec": "zvc"}, {"remat": False})),
    ],
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
        kept = [
            {why: n for why, n in counts.items() if why not in ("parameter", "small")}
            for counts in (stats.kept_by_reason, stats.kept_bytes_by_reason)
        ]
        return bits, (stats.swapped, stats.deduplicated, kept, codecs), seen

    bits, quiet, seen = trained()
    monkeypatch.setattr("cswap.quiet_modules.quiet_modules.QuietModules.run", lambda *_: None)
    plain_bits, loud, all_seen = trained()
    assert quiet == loud
    assert all(map(same_bits, bits, plain_bits))
    assert seen < all_seen


def with_rare_looks(install, monkeypatch):
    """A training whose large tensors stay for long."""
    monkeypatch.setattr(looks, "EARLY", ())
    monkeypatch.setattr(looks, "EVERY", 40)
    training = Training()
    handle = install(training.model, remat=False)
    return training, handle


def test_tensors_that_stay_do_not_come_to_the_hooks(install, monkeypatch, packs):
    training, handle = with_rare_looks(install, monkeypatch)
    for _ in range(20):
        training.step()
    packs.clear()
    kept = handle.stats.kept_by_reason["does_not_pay"]
    training.step()
    assert packs.total() <= 2  # the loss is no module
    assert handle.stats.kept_by_reason["does_not_pay"] > kept
    for _ in range(19):
        training.step()
    packs.clear()
    training.step()  # a look
    assert packs[16 * 64]


def test_positions_go_on_after_tensors_that_rest(install, monkeypatch):
    training, handle = with_rare_looks(install, monkeypatch)
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


def test_inputs_of_recomputed_tensors(install, packs, monkeypatch):
    monkeypatch.setattr("cswap.advisor.advisor.Advisor.pays_again", lambda *_, **__: True)
    training, plain = Training(), Training()
    handle = install(training.model)
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


@pytest.mark.parametrize("tells", [False, True])
def test_a_torch_that_does_not_tell_tensors_from_objects(install, packs, monkeypatch, tells):
    monkeypatch.setattr("cswap.quiet_modules.quiet_modules.CAN_TELL", tells)
    monkeypatch.setattr("cswap.engine.recomputer.CAN_TELL", tells)
    monkeypatch.setattr("cswap.advisor.advisor.Advisor.pays_again", lambda *_, **__: True)

    def make():
        torch.manual_seed(0)
        blocks = [(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(3)]
        return nn.Sequential(nn.Linear(4, 64), *(layer for block in blocks for layer in block))

    training, plain = Training(make()), Training(make())
    handle = install(training.model)
    for n in range(STEPS):
        packs.clear()
        before = handle.stats.by_codec["remat"].count if n else 0
        assert same_bits(training.step(), plain.step())
        assert handle.stats.by_codec["remat"].count - before == 3
    assert bool(packs[16]) is not tells  # statistics of the norms


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
    monkeypatch.setattr("cswap.advisor.advisor.Advisor.pays_again", lambda *_, **__: True)
    model = nn.Sequential(nn.Flatten(0), Around(OuterProduct()), nn.GELU(), Around(nn.Tanh()))
    training = Training(model)
    handle = install(model)
    totals = [0]
    for _ in range(STEPS):
        training.step()
        totals.append(handle.stats.by_codec["remat"].count)
    assert {after - before for before, after in pairwise(totals)} == {1}


class Twice(Net):
    """Calls two modules twice: one whose tensors leave, and one that saves small ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        x = self.wide(self.small(self.small(self.first(x))))
        return self.large[0](self.large[0](x))


def test_modules_that_are_called_twice(install, packs):
    training, plain = Training(Twice()), Training(Twice())
    handle = install(training.model, remat=False, codec="raw")
    swapped, counts = [], []
    for _ in range(STEPS):
        packs.clear()
        before = handle.stats.swapped
        assert same_bits(training.step(), plain.step())
        swapped.append(handle.stats.swapped - before)
        counts.append(packs.total())
    assert len(set(swapped[1:])) == 1
    assert counts[-1] < counts[0] - 10


def test_own_code_between_two_modules_may_be_quiet(install, packs):
    class Between(Net):
        def forward(self, x):
            x = self.wide(self.small(x))
            for _ in range(8):
                x = x[:, :3].sin().cos().repeat(1, 22)[:, :64]
            return self.large(x)

    training = Training(Between())
    install(training.model, remat=False, codec="raw")
    settle(training, packs)
    training.step()
    assert packs[16 * 64]
    assert packs[16 * 3] == 0


def test_autograd_does_not_hold_what_a_step_has_learned(install):
    training = Training()
    handle = install(training.model, remat=False, codec="raw")
    handle_bytes = []
    for _ in range(2):
        loss = training.model(torch.randn(16, 4)).square().mean()
        handle_bytes.append(handle.stats.device_bytes)
        del loss
    assert handle_bytes == [0, 0]


def test_graphs_inside_of_a_forward_are_freed_in_a_recorded_call(install):
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
