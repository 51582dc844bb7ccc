"""Tensors that are computed again from results that other operators than their own have saved."""

from __future__ import annotations

import random
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remat.conftest import Engine

    Function = Callable[[torch.Tensor], torch.Tensor]

N = 64


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(values=True)


def make_leaf() -> torch.Tensor:
    return torch.randn(N, N, requires_grad=True)


def unsaved(x: torch.Tensor) -> torch.Tensor:
    """A result that neither its operator saves, nor can be computed again."""
    return x.cumsum(0)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Saves its argument."""
    return functional.layer_norm(x, (N,))


def gelu_by_hand(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


def run(engine: Engine, function: Function) -> None:
    """The engine compares all that comes back bit by bit."""
    with engine.hooks():
        function(make_leaf()).square().sum().backward()


def residual(x: torch.Tensor) -> torch.Tensor:
    x = unsaved(x)
    x = x + torch.tanh(norm(x))
    return norm(x)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (residual, "add"),
        (lambda x: gelu_by_hand(unsaved(x)), "mul"),
        (lambda x: norm(h := unsaved(x)) + norm(h.t() + torch.tanh(make_leaf())), "add"),
        (lambda x: norm(h := unsaved(x)) + norm(h + torch.tanh(make_leaf()) + h), "add>add"),
    ],
    ids=["residual", "gelu", "view", "twice"],
)
def test_values_that_others_save_are_inputs(engine, make_engine, function, operator):
    run(engine, function)
    alone = make_engine()
    run(alone, function)
    assert engine.found.count(operator) == 1 + alone.found.count(operator)


def test_a_tensor_that_nobody_holds_any_more_is_no_input(engine):
    with engine.hooks():
        x = unsaved(make_leaf())
        y = norm(x)
        engine.forget()
        del y  # and with it what the norm has saved
        norm(x + torch.tanh(make_leaf()))
    assert "add" not in engine.found


@pytest.mark.parametrize("again", [False, True])
def test_the_latest_holder_counts_where_the_first_is_gone(engine, again):
    with engine.hooks():
        x = unsaved(make_leaf())
        y = norm(x)
        engine.forget()
        del y
        z = norm(x) if again else x
        out = norm(x + torch.tanh(make_leaf()))
    assert ("add" in engine.found) == again
    (out.sum() + z.sum()).backward()


def test_a_write_that_autograd_sees_makes_another_value(engine):
    def function(x):
        x = unsaved(x)
        with_first = norm(x)
        y = x * 1.0
        y = y.add_(1.0)
        return norm(y + torch.tanh(make_leaf())) + with_first

    run(engine, function)


def test_a_value_that_was_written_into_before_it_was_saved_is_no_input(engine):
    with engine.hooks():
        x = unsaved(make_leaf())
        y = x + torch.tanh(make_leaf())  # of the value before
        with torch.no_grad():
            x.mul_(2.0)
        z = norm(x)
        out = norm(y)
    assert "add" not in engine.found
    (out.sum() + z.sum()).backward()


def test_a_write_after_the_value_was_saved_raises_as_autograd_does(engine):
    with engine.hooks():
        x = unsaved(make_leaf())
        z = norm(x)
        out = norm(x + torch.tanh(make_leaf()))
        with torch.no_grad():
            x.mul_(2.0)
    assert "add" in engine.found
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (out.sum() + z.sum()).backward()


@pytest.mark.parametrize("saved", [0, 1])
def test_another_result_of_a_node_is_another_value(engine, saved):
    def function(x):
        both = torch.var_mean(unsaved(x), 0, keepdim=True)
        found = norm(both[saved])
        return found + norm(both[1 - saved] + torch.tanh(make_leaf()))

    run(engine, function)


def test_two_engines_know_their_own_objects_only(make_engine):
    first, second = make_engine(values=True), make_engine(values=True)
    with first.hooks():
        x = unsaved(make_leaf())
        z = norm(x)
    with second.hooks():
        out = norm(x + torch.tanh(make_leaf()))
    assert "add" not in second.found
    (out.sum() + z.sum()).backward()


def test_a_note_keeps_nothing_alive(engine):
    x = unsaved(make_leaf())
    with engine.hooks():
        y = norm(x)
    held = weakref.ref(engine.packed[0])
    engine.forget()
    assert held() is not None
    del y
    assert held() is None


def test_a_graph_with_notes_goes_with_its_tensors(engine):
    with engine.hooks():
        out = residual(make_leaf())
    assert "add" in engine.found
    held = [weakref.ref(packed) for packed in engine.packed]
    engine.forget()
    del out
    assert all(packed() is None for packed in held)


def test_random_programs(make_engine):
    """Each tensor that comes back is compared; the same program again is recognised."""
    n_values = 0
    for seed in range(150):
        engine = make_engine(values=True, products=True, max_depth=4, max_passes=48)
        for _ in range(2):
            run(engine, partial(_random, random.Random(seed)))
        n_values += sum(_has_value(remat) for remat in engine.remats)
    assert n_values > 150


def _has_value(remat: Any) -> bool:
    return any(node.notes is not None for node in remat.formula.recognition._nodes)


def _random(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    live = [x, unsaved(x)]
    ones: list[Function] = [
        unsaved, norm, torch.tanh, functional.gelu, gelu_by_hand, torch.t, torch.neg,
        lambda x: x * 0.5, lambda x: x.clone().add_(1.0), lambda x: x[: N // 2].repeat(2, 1),
        lambda x: functional.linear(x, torch.eye(N, requires_grad=True)),
        lambda x: torch.native_dropout(x, 0.2, True)[0],
    ]  # fmt: skip
    for _ in range(draw.randint(3, 12)):
        a, b = draw.choice(live), draw.choice(live)
        kind = draw.randrange(4)
        if kind == 0:
            live.append(a + b)
        elif kind == 1:
            live.append(a * b)
        else:
            live.append(draw.choice(ones)(a))
    found: torch.Tensor = sum(live[2:], live[0] + live[1])
    return norm(found)
