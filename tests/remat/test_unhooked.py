"""Tensors that autograd holds without hooks are inputs, too. See Note [slots without hooks]."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from cswap.remat.finder import Finder
from cswap.remat.reads import READS_UNHOOKED
from cswap.remat.record import same_bits
from tests.remat.conftest import Held

pytestmark = pytest.mark.skipif(not READS_UNHOOKED, reason="torch does not tell such slots")

FINDER = Finder(lambda packed: getattr(packed, "depth", None), keep=Held)


def normed(x, weight):
    return functional.layer_norm(x, (8,), weight, torch.full((8,), 0.5))


@pytest.fixture
def x():
    return torch.randn(32, 8, requires_grad=True) * 1.0


@pytest.fixture
def weight():
    return torch.rand(8, requires_grad=True)


def test_a_tensor_is_computed_from_what_nodes_hold(x, weight):
    for result in (functional.gelu(x), normed(x, weight), functional.silu(normed(x, weight))):
        found = FINDER.find(result)
        assert found is not None
        assert all(isinstance(packed, Held) for packed in found.inputs)
        assert same_bits(found.run([packed.unpack() for packed in found.inputs]), result)
        assert Finder(FINDER._depth_of).find(result) is None


def test_it_is_recognised_in_the_next_step_with_and_without_hooks(x, weight):
    def step():
        return functional.silu(normed(torch.randn(32, 8, requires_grad=True) * 1.0, weight))

    first = FINDER.find(step())
    assert first is not None
    with saved_tensors_hooks(Held, Held.unpack):
        hooked = step()
    for result in (hooked, step()):
        found = FINDER.recognised(result, first.formula)
        assert found is not None
        assert same_bits(found.run([packed.unpack() for packed in found.inputs]), result)


def test_a_node_that_is_met_twice_gives_its_tensors_once(x, weight):
    norm = normed(x, weight)
    result = norm * 2.0 + norm * 3.0
    found = FINDER.find(result)
    assert found is not None
    assert len(found.inputs) == 5
    assert same_bits(found.run([packed.unpack() for packed in found.inputs]), result)
    again = FINDER.recognised(result, found.formula)
    assert again is not None
    assert len(again.inputs) == len(found.inputs)
    assert same_bits(again.run([packed.unpack() for packed in again.inputs]), result)


def test_a_tensor_that_was_modified_since_is_no_input(x):
    result = functional.gelu(x)
    found = FINDER.find(result)
    assert found is not None
    with torch.no_grad():
        x.add_(1.0)
    assert FINDER.find(result) is None
    assert FINDER.recognised(result, found.formula) is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.inputs[0].unpack()  # type: ignore[attr-defined]


def test_what_other_hooks_have_packed_is_no_input(x):
    with saved_tensors_hooks(lambda t: t.detach().half(), lambda t: t.float()):
        result = functional.gelu(x)
    assert FINDER.find(result) is None


def test_numbers_that_torch_has_wrapped_stay_constants(x):
    for factor in (2.0, 3):
        found = FINDER.find(functional.gelu(x) * factor)
        assert found is not None
        assert all(isinstance(packed, Held) for packed in found.inputs)


def test_a_graph_that_was_freed_is_not_read(x):
    result = functional.gelu(x)
    result.sum().backward()
    assert FINDER.find(result) is None
