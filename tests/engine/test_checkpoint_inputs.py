"""Arguments of a function that the user checkpoints: what was one object is one in backward."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import cswap
from cswap import checkpoint_inputs
from tests.engine.engines import assert_empty

N = 64
OPTIONS: list[dict[str, Any]] = [
    {},
    {"codec": "zvc", "min_bytes": 0},
    {"codec": "raw", "min_bytes": 0},
    {"fit": "min", "min_bytes": 0},
]


class Attention(nn.Module):
    """Self-attention in a checkpoint: torch's module asks whether its three arguments are one."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(N, N), nn.MultiheadAttention(N, 4, batch_first=True)

    def forward(self, x):
        """Args: x: [n, 32, N]."""
        y = torch.tanh(self.first(x))
        return checkpoint(self.attention, y, y, y, use_reentrant=False)[0]


class Asks(nn.Module):
    """A checkpointed function with two branches, which save other values of the same sizes."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first = kind, nn.Linear(N, N)
        self.answers: list[bool] = []

    def forward(self, x):
        """Args: x: [n, 32, N]."""
        self.answers = []
        y = torch.tanh(self.first(x))
        if self.kind == "twice":
            return checkpoint(self.branch, y, y, use_reentrant=False)
        if self.kind == "three":
            z = y + 1
            return checkpoint(lambda a, b, c: self.branch(a, c) * b, y, z, y, use_reentrant=False)
        if self.kind == "keyword":
            return checkpoint(self.branch, y, other=y, use_reentrant=False)
        if self.kind == "list":
            return checkpoint(lambda a, b: self.branch(a, b[0]), y, [y], use_reentrant=False)
        if self.kind == "closure":
            return checkpoint(lambda a: self.branch(a, y), y, use_reentrant=False)
        if self.kind == "detached":
            z = y.detach()
            return checkpoint(lambda a, b: self.first(self.branch(a, b)), z, z, use_reentrant=False)
        if self.kind == "view":
            return checkpoint(self.branch, y, y.view_as(y), use_reentrant=False)
        assert self.kind == "equal"
        return checkpoint(self.branch, y, y.clone(), use_reentrant=False)

    def branch(self, a, other):
        """Whether the two are one decides."""
        same = a is other
        self.answers.append(same)
        return (a * (3.0 if same else 5.0)).sin() * other


SAME = ["twice", "three", "keyword", "list", "closure", "detached"]
OTHERS = ["view", "equal"]


def two(make):
    torch.manual_seed(0)
    plain, mine = make(), make()
    mine.load_state_dict(plain.state_dict())
    return plain, mine


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.sampled
@pytest.mark.parametrize("n", [2, 64])
@pytest.mark.parametrize("options", OPTIONS)
def test_attention_whose_arguments_are_one(options, n):
    plain, mine = two(Attention)
    x = torch.randn(n, 32, N)
    wanted = gradients(plain, x)
    with cswap.install(mine, **options):
        for _ in range(6):
            assert all(map(torch.equal, gradients(mine, x), wanted))


@pytest.mark.parametrize("around", [cswap.swapping, save_on_cpu])
def test_hooks_on_a_thread(around):
    plain, mine = two(Attention)
    x = torch.randn(64, 32, N)
    wanted = gradients(plain, x)
    with around():
        assert all(map(torch.equal, gradients(mine, x), wanted))


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [*SAME, *OTHERS])
def test_a_function_takes_the_branch_of_its_first_forward(kind, options):
    plain, mine = two(lambda: Asks(kind))
    x = torch.randn(64, 32, N)
    wanted = gradients(plain, x)
    assert plain.answers == [kind in SAME] * 2
    with cswap.install(mine, **options):
        for _ in range(6):
            assert all(map(torch.equal, gradients(mine, x), wanted))
            assert mine.answers == plain.answers


def test_lossy_arguments_that_are_one():
    plain, mine = two(lambda: Asks("twice"))
    x = torch.randn(64, 32, N)
    wanted = gradients(plain, x)
    with cswap.install(mine, lossy="int8", min_bytes=0) as handle:
        for _ in range(4):
            for found, expected in zip(gradients(mine, x), wanted, strict=True):
                assert (found - expected).norm() <= 0.05 * expected.norm()
            assert mine.answers == [True, True]
    assert handle.stats.swapped > 0


def test_two_backwards():
    _, mine = two(lambda: Asks("twice"))
    x = torch.randn(64, 32, N)
    parameters = list(mine.parameters())
    with cswap.install(mine, codec="zvc", min_bytes=0):
        loss = mine(x).square().mean()
        once = torch.autograd.grad(loss, parameters, retain_graph=True)
        assert all(map(torch.equal, torch.autograd.grad(loss, parameters), once))
        assert mine.answers == [True] * 3


def test_an_argument_that_was_modified_raises():
    model = Asks("twice")
    with cswap.swapping(codec="zvc", min_bytes=0):
        y = model.first(torch.randn(64, N))
        loss = checkpoint(model.branch, y, y, use_reentrant=False).sum()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("swaps", [False, True])
def test_what_hooks_of_others_have_copied_counts_where_the_argument_was_modified(swaps):
    """As on a GPU under `save_on_cpu`: the copy is of the forward, and nobody raises."""
    w = torch.full((4,), 3.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        y = w - 2.0
        out = checkpoint(lambda a: (a * w).sin(), y, use_reentrant=False)
    with torch.no_grad():
        y.mul_(5)
    with cswap.swapping() if swaps else nullcontext():
        out.sum().backward()
    expected = torch.full((4,), 3.0, requires_grad=True)
    ((expected - 2.0) * expected).sin().sum().backward()
    assert w.grad is not None
    assert expected.grad is not None
    assert torch.equal(w.grad, expected.grad)


def test_arguments_are_not_held():
    alive: list[weakref.ref[torch.Tensor]] = []

    def noted(a, b):
        alive.extend((weakref.ref(a), weakref.ref(b)))
        return (a * 3.0).sin() * b

    layer = nn.Linear(N, N)
    with cswap.swapping(codec="zvc", min_bytes=0) as engine:
        y = torch.tanh(layer(torch.randn(256, N)))
        loss = checkpoint(noted, y, y, use_reentrant=False).square().mean()
        del y
        assert [reference() for reference in alive] == [None, None]  # only its encoding is
        loss.backward()
    del loss
    gc.collect()
    assert len(alive) == 4
    assert all(reference() is None for reference in alive)
    assert_empty(engine)


class Node(torch.autograd.Function):
    """Keeps arguments as torch before 2.13 did."""

    @staticmethod
    def forward(*_args):
        """Nothing is computed."""
        return torch.empty((0,))

    @staticmethod
    def setup_context(ctx, inputs, _output):
        """Args: inputs: a tensor of torch's own, and the arguments."""
        places = [n for n, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        others = [None if isinstance(x, torch.Tensor) else x for x in inputs]

        def get_args(tensors):
            found = dict(zip(places, tensors, strict=True))
            return [found.get(n, x) for n, x in enumerate(others)][1:]

        ctx.get_args = get_args
        ctx.save_for_backward(*(inputs[n] for n in places))


@pytest.mark.parametrize("is_held", [False, True])
def test_arguments_as_an_older_torch_keeps_them(is_held):
    checkpoint_inputs._watch_nodes(Node)
    layer = nn.Linear(N, N)
    with cswap.swapping(codec="zvc", min_bytes=0):
        y, z = layer(torch.randn(64, N)), layer(torch.randn(64, N))
        held, values = [y, z] if is_held else [], (y.detach().clone(), z.detach().clone())
        node: Any = Node.apply(torch.empty((0,), requires_grad=True), y, "word", z, y).grad_fn
        del y, z
        a, word, b, c = node.get_args(node.saved_tensors)
    assert (a is c, a is b, word) == (True, False, "word")
    assert torch.equal(a, values[0])
    assert torch.equal(b, values[1])
    assert not is_held or (a is held[0] and b is held[1])
