"""The autograd hooks end with the forward that pushed them, whatever ends it."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode

import cswap
from cswap import hook_stack
from cswap.hooks import HookPair, Swapping

ALL: dict[str, Any] = {"min_bytes": 0, "guard_every": 0}


def top():
    return hook_stack.top(True)


class Raises(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


def net(last=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), last or nn.Linear(64, 64))


def gradient_is_exact():
    w = torch.linspace(-1, 1, 4096, requires_grad=True)
    (found,) = torch.autograd.grad((w.sin() * w.cos()).sum(), w)
    x = w.detach()
    return torch.equal(found, x.cos() * x.cos() - x.sin() * x.sin())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_a_forward_that_is_cut_short_leaves_no_hooks(error):
    model = net(Raises(error()))
    handle = cswap.install(model, codec="int8", **ALL)
    with pytest.raises(error):
        model(torch.randn(64, 64))
    assert top() is None
    assert _get_current_function_mode() is None
    assert handle.engine.scopes.current.path == ""
    handle.remove()
    assert gradient_is_exact()


def test_a_generator_that_is_closed_in_a_forward_leaves_no_hooks():
    model = net()

    def outputs():
        with cswap.install(model, codec="int8", **ALL):
            while True:
                yield model(torch.randn(8, 64))

    generator = outputs()
    next(generator)
    generator.close()
    assert top() is None
    assert "forward" not in vars(model)


def test_other_threads_keep_their_own_stacks():
    model, tops = net(Raises(KeyboardInterrupt())), []
    handle = cswap.install(model, codec="int8", **ALL)

    def forward():
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(64, 64))
        tops.append(top())

    with cswap.swapping(**ALL):
        mine = top()
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        assert top() == mine
    assert tops == [None]
    handle.remove()


def test_a_pre_hook_of_the_users_that_raises_takes_nobody_elses_hooks_off():
    model = net()

    def refuse(_module, _args):
        raise ValueError("no")

    with cswap.install(model, **ALL), cswap.swapping(**ALL) as outer:
        model.register_forward_pre_hook(refuse, prepend=True)
        model[1].register_forward_pre_hook(refuse, prepend=True)
        pair = top()
        with pytest.raises(ValueError, match="no"):
            model(torch.randn(8, 64))
        assert top() == pair
        before = outer.stats.packed
        torch.randn(64, requires_grad=True).exp()
        assert outer.stats.packed == before + 1
    assert top() is None


@pytest.mark.parametrize("oldest_first", [True, False])
def test_two_installs_for_everything_may_be_removed_in_any_order(oldest_first):
    handles = [cswap.install(**ALL) for _ in range(2)]
    for handle in handles if oldest_first else reversed(handles):
        handle.remove()
    assert top() is None


def test_hooks_that_are_removed_in_another_thread_go_with_the_next_save():
    handle = cswap.install(codec="int8", **ALL)
    thread = threading.Thread(target=handle.remove)
    thread.start()
    thread.join()
    assert gradient_is_exact()  # an inactive pair leaves tensors alone
    assert top() is None


def test_an_interrupt_while_the_hooks_are_pushed_leaves_none(monkeypatch):
    push = HookPair.push

    def interrupted(self):
        push(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(HookPair, "push", interrupted)
    model = net()
    with cswap.install(model, **ALL), pytest.raises(KeyboardInterrupt):
        model(torch.randn(8, 64))
    with pytest.raises(KeyboardInterrupt), cswap.swapping(**ALL):
        pass
    with pytest.raises(KeyboardInterrupt):
        cswap.install(**ALL)
    assert top() is None


def test_a_with_that_cannot_end_properly_leaves_tensors_alone(monkeypatch):
    """Python checks for interrupts when a function begins: before the first line of __exit__."""

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Swapping, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt), cswap.swapping(codec="int8", **ALL):
            pass
    assert gradient_is_exact()
    assert top() is None


def test_a_second_install_replaces_the_first(caplog):
    model = net()
    first = cswap.install(model, **ALL)
    second = cswap.install(model, **ALL)
    assert "was installed before" in caplog.text
    model(torch.randn(8, 64)).sum().backward()
    assert (first.stats.packed, second.stats.packed > 0) == (0, True)
    first.remove()  # a notebook's cell that is run again
    model(torch.randn(8, 64))
    assert second.stats.packed > 6
    second.remove()
    assert not {"forward", "__getstate__"} & set(vars(model))


def test_forward_looks_as_before():
    model = net()
    before = inspect.signature(model.forward)
    with cswap.install(model, **ALL):
        assert inspect.signature(model.forward) == before
        x = torch.randn(8, 64)
        assert torch.equal(model.forward(x), model(x))

    def replaced(x, *, scale=1.0):
        return x * scale

    model.forward = replaced
    with cswap.install(model, **ALL) as handle:
        assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
        assert torch.equal(
            model(torch.ones(2, requires_grad=True), scale=3.0), torch.full((2,), 3.0)
        )
        assert handle.stats.packed == 0  # multiplied by a number: nothing to save
    assert model.forward is replaced


def test_a_wrapper_that_somebody_kept_does_nothing_after_removal():
    model = net()
    handle = cswap.install(model, **ALL)
    kept = model.forward
    model.forward = lambda x: kept(x)  # as other libraries do
    handle.remove()
    model(torch.randn(8, 64)).sum().backward()
    assert handle.stats.packed == 0
    assert top() is None


def test_replicas_of_an_installed_model_swap_their_own():
    model = net()
    with cswap.install(model, **ALL) as handle:
        replica = model._replicate_for_data_parallel()
        for name, parameter in model.named_parameters(recurse=False):
            setattr(replica, name, parameter)
        for child, module in model.named_children():
            setattr(replica, child, module)
        assert replica.forward.__self__ is replica
        replica(torch.randn(8, 64)).sum().backward()
        assert handle.stats.packed > 0
