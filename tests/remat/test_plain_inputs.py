"""Inputs that autograd holds itself: saved while no hooks were on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from cswap.remat.finder import Finder
from cswap.remat.reads import CAN_TELL
from cswap.remat.record import same_bits
from tests.remat.conftest import Held

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not CAN_TELL, reason="needs torch 2.11")

FINDER: Final = Finder(keep=Held)


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, (32,), torch.ones(32), torch.zeros(32))


def batch_norm(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(32, requires_grad=True)
    return functional.relu(functional.batch_norm(x, None, None, weight, weight, training=True))


def times_itself(x: torch.Tensor) -> torch.Tensor:
    return x * x


def times_three(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 3.0


def selected(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)[:, torch.tensor([3, 1, 3])]


OPERATORS: Final = (
    *(layer_norm, batch_norm, functional.gelu, functional.silu),
    *(times_itself, times_three, selected),
)


def hidden(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(256, 32, requires_grad=True) * 2.0


@pytest.mark.parametrize("operator", OPERATORS)
def test_they_serve_as_well_as_those_of_hooks(
    operator: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = hidden()
    y = operator(x)
    remat = FINDER.find(y)
    assert remat is not None
    again = remat.run([packed.unpack() for packed in remat.inputs])  # type: ignore[attr-defined]
    assert same_bits(again, y.detach())
    other = operator(hidden(1))
    found = FINDER.recognised(other, remat.formula)
    assert found is not None
    assert all(packed.tensor.grad_fn is None for packed in found.inputs)  # type: ignore[attr-defined]
    again = found.run([packed.unpack() for packed in found.inputs])  # type: ignore[attr-defined]
    assert same_bits(again, other.detach())


def test_a_formula_that_was_found_under_hooks_is_recognised() -> None:
    with saved_tensors_hooks(Held, Held.unpack):
        remat = FINDER.find(layer_norm(hidden()))
    assert remat is not None
    y = layer_norm(hidden(1))
    found = FINDER.recognised(y, remat.formula)
    assert found is not None
    again = found.run([packed.unpack() for packed in found.inputs])  # type: ignore[attr-defined]
    assert same_bits(again, y.detach())


@pytest.mark.parametrize("operator", [layer_norm, functional.gelu, torch.Tensor.square])
def test_one_that_was_modified_is_none(operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
    remat = FINDER.find(operator(hidden()))
    assert remat is not None
    x = hidden()
    y = operator(x)
    x.add_(1.0)
    assert FINDER.find(y) is None
    assert FINDER.recognised(y, remat.formula) is None


def test_a_saved_result_that_was_modified_is_none() -> None:
    remat = FINDER.find(times_three(hidden()))
    assert remat is not None
    result = torch.tanh(hidden())
    y = result * 3.0
    result.add_(1.0)
    assert FINDER.find(y) is None
    assert FINDER.recognised(y, remat.formula) is None


@pytest.mark.parametrize("pack", [torch.Tensor.clone, torch.Tensor.detach])
def test_tensors_of_other_hooks_are_none(pack: Callable[[torch.Tensor], torch.Tensor]) -> None:
    remat = FINDER.find(layer_norm(hidden()))
    assert remat is not None
    asked = []

    def unpack(x: torch.Tensor) -> torch.Tensor:
        asked.append(x)
        return x

    with torch.no_grad():
        weights = torch.ones(32), torch.zeros(32)
    x = hidden()
    with saved_tensors_hooks(pack, unpack):
        y = functional.layer_norm(x, (32,), *weights)
    assert FINDER.find(y) is None
    assert FINDER.recognised(y, remat.formula) is None
    assert not asked


def test_a_graph_that_was_freed_has_none() -> None:
    remat = FINDER.find(layer_norm(hidden()))
    assert remat is not None
    y = layer_norm(hidden())
    y.sum().backward()
    assert FINDER.find(y) is None
    assert FINDER.recognised(y, remat.formula) is None


def test_a_finder_that_keeps_nothing_takes_none() -> None:
    finder = Finder()
    remat = FINDER.find(layer_norm(hidden()))
    assert remat is not None
    y = layer_norm(hidden())
    assert finder.find(y) is None
    assert finder.recognised(y, remat.formula) is None


def test_other_layouts_are_none() -> None:
    x = torch.eye(32, requires_grad=True).to_sparse()
    y = torch.sparse.softmax(x, 1)
    assert FINDER.find(y) is None
