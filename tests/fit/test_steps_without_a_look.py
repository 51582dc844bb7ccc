"""Most steps that obey a goal's plan are not looked at: each place keeps the last choice."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from bench.workloads.saved_bytes import SavedBytes
from cswap.fit.goal_chooser import FIRST_LOOKS, LOOK_EVERY

SETTLED = 3 + 2 * LOOK_EVERY
"""Steps after which the plan stays, and the next step is the first of a round of looks."""


@pytest.fixture
def looks(monkeypatch):
    """Per step: how often the chooser was asked about a tensor."""
    from cswap.fit.goal_chooser import GoalChooser

    seen: list[int] = []

    def noted(name):
        original = getattr(GoalChooser, name)

        def call(self, *arguments):
            if name == "look":
                seen.append(0)
            else:
                seen[-1] += 1
            return original(self, *arguments)

        monkeypatch.setattr(GoalChooser, name, call)

    for name in ("look", "keeps", "choose", "packed", "unpacked"):
        noted(name)
    return seen


def until_a_look(training, looks):
    """Train until a step of a settled plan was looked at: the next one will not be."""
    for n in range(SETTLED + 2 * LOOK_EVERY):
        training.step()
        if n > SETTLED and looks[-1]:
            return
    raise AssertionError(looks)


@pytest.mark.parametrize("share", [pytest.param(0.75, marks=pytest.mark.slow), 0.5])
def test_a_step_without_a_look_takes_as_many_bytes(make_training, install, looks, share):
    pytest.importorskip("sklearn")
    from bench.fit.models import WithLoss
    from bench.workloads.modes import held

    model = WithLoss(make_training("blocks").model)
    batch = torch.randn(128, 32), torch.randint(32, (128,))

    def peak(handle):
        owned = [*model.parameters(), *model.buffers()]
        meter = SavedBytes(owned, (), lambda: held(handle))
        model.probe = meter.watch
        model.zero_grad()
        model(*batch).backward()
        model.probe = nullcontext
        return meter.curve.peak

    saved = peak(None)
    resident = 2 * sum(p.nbytes for p in model.parameters())
    handle = install(model, fit=int(resident + share * saved))
    found: dict[bool, set[tuple[int, tuple[tuple[str, int], ...]]]]
    found = {True: set(), False: set()}
    for n in range(SETTLED + 2 * LOOK_EVERY):
        before = Counter({name: c.count for name, c in handle.stats.by_codec.items()})
        most = peak(handle)
        after = Counter({name: c.count for name, c in handle.stats.by_codec.items()})
        if n >= SETTLED:
            found[looks[-1] > 0].add((most, tuple(sorted((after - before).items()))))
    assert handle.goal.phase == "obeying"
    assert found[True] == found[False]
    assert len(found[True]) == 1
    ((most, ways),) = found[True]
    assert ways
    assert most <= share * saved


def test_one_step_in_eight_is_looked_at(make_training, sizes, install, looks):
    training = make_training("blocks")
    resident, saved = sizes(training)
    del looks[:]
    handle = install(training.model, fit=int(resident + 0.6 * saved))
    for _ in range(SETTLED + 3 * LOOK_EVERY):
        training.step()
    assert handle.goal.phase == "obeying"
    assert all(looks[: FIRST_LOOKS["cpu"]])
    assert sum(asked > 0 for asked in looks[-3 * LOOK_EVERY :]) == 3


def test_after_another_tensor_the_next_step_is_looked_at(make_training, sizes, install, looks):
    training = make_training("blocks")
    resident, saved = sizes(training)
    install(training.model, fit=int(resident + 0.6 * saved))
    until_a_look(training, looks)
    training.step(torch.cat([training.x, training.x[:1]]))
    assert not looks[-1]
    training.step()
    assert looks[-1]


def test_two_forwards_of_a_step_are_always_looked_at(make_training, sizes, install, looks):
    mine, plain = make_training("blocks"), make_training("blocks")
    resident, saved = sizes(mine)
    handle = install(mine.model, fit=int(resident + 1.2 * saved))
    for n in range(SETTLED + LOOK_EVERY):
        for one in (mine, plain):
            torch.manual_seed(n)
            one.optimizer.zero_grad()
            loss = one.model(one.x).square().mean() + one.model(2 * one.x).square().mean()
            loss.backward()
            one.gradients = [p.grad.clone() for p in one.model.parameters()]
            one.optimizer.step()
        assert all(map(torch.equal, mine.gradients, plain.gradients))
        if n > SETTLED:
            assert looks[-1] > 0
    assert handle.goal.phase == "obeying"
    assert handle.goal.held


@pytest.mark.parametrize("share", [pytest.param(0.75, marks=pytest.mark.slow), 0.5])
def test_gradients_keep_their_bits_for_many_steps(training, sizes, install, make_training, share):
    resident, saved = sizes(training)
    mine, plain = (make_training(training.kind) for _ in range(2))
    handle = install(mine.model, fit=int(resident + share * saved))
    for n in range(4 * LOOK_EVERY):
        for one in (mine, plain):
            torch.manual_seed(n)
            one.gradients = one.step()
        assert all(map(torch.equal, mine.gradients, plain.gradients))
    assert handle.stats.fallbacks == 0


def test_the_guard_forbids_a_codec_between_two_looks(make_training, sizes, install, looks):
    training = make_training("blocks")
    resident, saved = sizes(training)
    handle = install(training.model, fit=int(resident + 0.75 * saved), lossy="int8", remat=False)
    until_a_look(training, looks)

    def lossy():
        return sum(c.count for name, c in handle.stats.by_codec.items() if "int8" in name)

    before = lossy()
    training.step()
    assert not looks[-1]
    assert lossy() > before
    kinds = {type(module).__name__ for module in training.model.modules()}
    for codec in ("int8", "zvc+int8"):
        for kind in kinds:
            handle.engine.advisor.milder.forbid(kind, codec)
    before = lossy()
    training.step()
    assert lossy() == before
    training.step()
    assert looks[-1]


def test_a_change_in_place_raises_in_a_step_without_a_look(install, sizes, make_training, looks):
    training = make_training("blocks")
    resident, saved = sizes(training)
    install(training.model, fit=int(resident + 0.5 * saved))
    until_a_look(training, looks)
    outputs: list[torch.Tensor] = []
    layer = training.model[1].mlp[1]
    hook = layer.register_forward_hook(lambda _module, _args, out: outputs.append(out))
    loss = training.model(training.x).square().mean()
    hook.remove()
    with torch.no_grad():
        outputs.pop().mul_(2)
    assert not looks[-1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    training.optimizer.zero_grad()
    assert all(g.isfinite().all() for g in training.step())


def test_a_goal_that_ends_between_forward_and_backward(install, sizes, make_training, looks):
    mine, plain = make_training("blocks"), make_training("blocks")
    resident, saved = sizes(mine)
    handle = install(mine.model, fit=int(resident + 0.5 * saved))
    until_a_look(mine, looks)
    plain.model.load_state_dict(mine.model.state_dict())
    gradients = []
    for one in (mine, plain):
        torch.manual_seed(3)
        one.optimizer.zero_grad()
        loss = one.model(one.x).square().mean()
        if one is mine:
            assert not looks[-1]
            handle.remove()
        loss.backward()
        gradients.append([p.grad for p in one.model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_an_interrupt_in_a_step_without_a_look(install, sizes, make_training, looks):
    mine, plain = make_training("blocks"), make_training("blocks")
    resident, saved = sizes(mine)
    handle = install(mine.model, fit=int(resident + 0.5 * saved))
    until_a_look(mine, looks)

    def interrupts(*_):
        raise KeyboardInterrupt

    hook = mine.model[2].register_forward_hook(interrupts)
    with pytest.raises(KeyboardInterrupt):
        mine.step()
    hook.remove()
    plain.model.load_state_dict(mine.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(mine.optimizer.state_dict()))
    for n in range(2 * LOOK_EVERY):
        for one in (mine, plain):
            torch.manual_seed(n)
            one.gradients = one.step()
        assert all(map(torch.equal, mine.gradients, plain.gradients))
    assert handle.goal.phase == "obeying"
    assert handle.stats.fallbacks == 0


def test_two_models_that_take_turns(install, sizes, make_training):
    pairs = [(make_training(kind), make_training(kind)) for kind in ("blocks", "blocks")]
    for (mine, _), share in zip(pairs, (0.75, 0.5), strict=True):
        resident, saved = sizes(mine)
        install(mine.model, fit=int(resident + share * saved))
    for n in range(4 * LOOK_EVERY):
        for mine, plain in pairs:
            for one in (mine, plain):
                torch.manual_seed(n)
                one.gradients = one.step()
            assert all(map(torch.equal, mine.gradients, plain.gradients))
