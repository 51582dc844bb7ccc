"""A formula is recognised where the same call site saves the same thing, and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.nn import functional

from cswap.remat.record import Formula, Layout, Remat, Step
from cswap.remat.search import Search
from cswap.remat.settings import Settings
from tests.remat.conftest import FORMULAS
from tests.remat.test_values import held, make_leaf, saver

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remat.conftest import Engine

Function: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"

_weight = torch.randn(8, requires_grad=True)


def _square(x: torch.Tensor) -> torch.Tensor:
    y = x.neg()
    return y * y


_rows, _columns = torch.arange(8)[:, None], torch.arange(8)


PAIRS: dict[str, tuple[Function, Function]] = {
    "a wrapped number's kind": (lambda x: x * 1, lambda x: x * 1.0),
    "a wrapped number's zero": (lambda x: x * 0.0, lambda x: x * -0.0),
    "a number's kind": (lambda x: x.clamp(-1, 1), lambda x: x.clamp(-1.0, 1.0)),
    "the sign of zero": (
        lambda x: functional.leaky_relu(x, 0.0),
        lambda x: functional.leaky_relu(x, -0.0),
    ),
    "the sign of an imaginary zero": (
        lambda x: saver(torch.complex(x, x) ** complex(2, 0.0)).abs(),
        lambda x: saver(torch.complex(x, x) ** complex(2, -0.0)).abs(),
    ),
    "a text": (functional.gelu, lambda x: functional.gelu(x, approximate="tanh")),
    "a dimension": (lambda x: x.softmax(0), lambda x: x.softmax(1)),
    "an operator below": (lambda x: x.abs().neg(), lambda x: x.sin().neg()),
    "a view below": (lambda x: (x * 2).t().exp(), lambda x: (x * 2).view(8, 8).exp()),
    "one input for two": (lambda x: x.neg() * x.abs(), _square),
    "two inputs for one": (_square, lambda x: x.neg() * x.abs()),
    "an empty slot": (
        lambda x: functional.layer_norm(x, (8,), _weight, _weight),
        lambda x: functional.layer_norm(x, (8,), _weight),
    ),
    "a slot that was empty": (
        lambda x: functional.layer_norm(x, (8,), _weight),
        lambda x: functional.layer_norm(x, (8,), _weight, _weight),
    ),
    "depth of an input": (lambda x: (x @ x).tanh().neg(), lambda x: x.sin().tanh().neg()),
    "a dtype below": (lambda x: x.bfloat16().float(), lambda x: x.half().float()),
    "an index more": (lambda x: x[_rows[:, 0]], lambda x: x[_rows, _columns]),
    "an index less": (lambda x: x[_rows, _columns], lambda x: x[_rows[:, 0]]),
    "the place of an index": (lambda x: x[_columns], lambda x: x[:, _columns]),
    "a write": (torch.relu, lambda x: torch.relu_(x * 2)),
    "sizes": (torch.neg, lambda x: x.repeat(2, 1).tanh().neg()),
    "strides": (torch.neg, lambda x: x.t().neg()),
}
"""Two functions that differ in this alone, as far as a search reads."""


@pytest.mark.parametrize("name", PAIRS)
def test_another_formula_is_not_recognised(name: str, engine: Engine) -> None:
    FORMULAS.clear()
    for function in PAIRS[name]:
        with engine.hooks():  # its pack compares what is found with all formulas
            saver(function(held(make_leaf(8, 8)))).sum().backward()
    formulas = [remat.formula for remat in engine.remats]
    assert len(formulas) >= len(PAIRS[name])
    assert len({id(formula) for formula in formulas}) == len(formulas)


def test_no_search_where_the_formula_is_known(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
    FORMULAS.clear()
    with engine.hooks():
        net(torch.randn(64, 8)).sum().backward()
    first = [remat.formula for remat in engine.remats]
    assert engine.found
    finder = engine.finder
    assert finder is not None
    found: list[Formula] = []

    def pack(tensor: torch.Tensor) -> object:
        remat = finder.find(tensor, first[len(found)]) if len(found) < len(first) else None
        if remat is not None:
            found.append(remat.formula)
        return engine.pack_found(tensor, remat)

    def no_search(*_: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(Search, "remat", no_search)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda p: p.unpack()):
        net(torch.randn(64, 8)).sum().backward()
    assert found == first


def test_a_constant_may_be_further_away_than_the_inputs():
    """As a bias is that autocast copies: a goal's plan has to count that operator."""

    def never(*_):
        raise AssertionError

    layout = Layout.of(torch.zeros(2))
    steps = (Step("cast", never, (1,), ()), Step("addmm", never, (2, 0), ()))
    recognition: Any = None
    formula = Formula(steps, layout, 2, 4, 0, object, recognition, product=True)
    remat = Remat(formula, (object(),), (torch.zeros(1),), Settings.current(product=True))
    assert remat.distances == (1,)
    assert remat.own_depth == 2
