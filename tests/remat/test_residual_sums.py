"""Sums whose older summand is held by the first operator of the other branch."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from cswap.remat.upstream import HOLDERS, MOST_NODES, find_holder

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remat.conftest import Engine

WIDTH, TOKENS = 32, 48


@pytest.fixture
def goal(make_engine: Callable[..., Engine]) -> Engine:
    engine = make_engine(products=True, max_depth=6, max_passes=48)
    engine.least_numel = TOKENS * WIDTH
    return engine


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.dropout = nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.down(functional.gelu(self.up(self.norm(x))))) + x


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.second = nn.Conv2d(width, width, 1, bias=False)

    def forward(self, x):
        y = functional.relu(self.norms[0](self.first(x)))
        return x + self.norms[1](self.second(y))


def gradients(module: nn.Module, x: torch.Tensor, engine: Engine) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    with engine.hooks():
        loss = module(x * 1).sin().sum()
    return list(torch.autograd.grad(loss, (x, *module.parameters())))


def blocks(*kinds: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(WIDTH) for kind in kinds), nn.LayerNorm(WIDTH))


@pytest.mark.parametrize(
    ("kind", "operator"), [(Attention, "addmm>add"), (Mlp, "addmm>add")], ids=["attention", "mlp"]
)
def test_a_residual_sum_is_its_product_and_the_norms_argument(kind, operator, goal, storing):
    module, x = blocks(kind, kind), torch.randn(2, TOKENS, WIDTH)
    found = gradients(module, x, goal)
    assert goal.found.count(operator) >= 2
    sums = [r for r in goal.remats if r.formula.operator == operator]
    assert {len(remat.inputs) for remat in sums} == {3}  # the argument, a matrix, a weight
    assert all(map(torch.equal, found, gradients(module, x, storing)))


def test_without_products_a_sum_of_a_norm_is_found(engine, storing):
    torch.manual_seed(0)
    module, x = nn.Sequential(Bottleneck(8), Bottleneck(8)), torch.randn(2, 8, 6, 6)
    engine.least_numel = 500
    found = gradients(module, x, engine)
    assert engine.found.count("batch_norm>add") == 2
    assert all(map(torch.equal, found, gradients(module, x, storing)))


def test_a_holder_beside_the_sum_does_not_count(goal):
    """Its backward need not run: a program may write into the value, or free it, before."""
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    norm, linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    with goal.hooks():
        y = (x * 2.0).erfinv()
        beside = norm(y)
        total = y + linear(x)
        total.sin().sum().backward()
    assert beside.requires_grad
    assert not any("add" in operator for operator in goal.found)


@pytest.mark.parametrize("writes", ["in place", "without autograd"])
def test_another_value_than_the_held_one_is_not_taken(writes, goal, storing):
    norm, linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    x = torch.randn(TOKENS, WIDTH)

    def loss(x):
        y = x * 1
        z = linear(norm(y))
        if writes == "in place":
            y = y.mul_(2)
        else:
            with torch.no_grad():
                y.mul_(2)
        return (y + z).sin().sum()

    for engine in (goal, storing):
        with engine.hooks():
            total = loss(x.detach().requires_grad_())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()  # as plain torch does, for the norm


class Halves(nn.Module):
    """The norm holds one part of a tensor, and the sum takes this part or the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.takes = 0

    def forward(self, x):
        parts = torch.unbind(torch.stack((x.sin(), x.cos())).cumsum(0))
        held = parts[1].mul(2.0), parts[1].mul(2.0)
        y = self.linear(self.norm(held[0]))
        return (held[self.takes] + y).sin() + (parts[self.takes] + self.linear(self.norm(parts[1])))


def test_a_sum_takes_the_value_that_is_held_and_no_other(goal, storing):
    """Other outputs of a node, and nodes of the same kind, look alike."""
    module = Halves()
    x = torch.randn(2, TOKENS, WIDTH)
    for takes in (0, 1, 0, 1):
        module.takes = takes
        found = gradients(module, x, goal)
        assert all(map(torch.equal, found, gradients(module, x, storing)))
        x = x + 1
    names = [remat.formula.operator for remat in goal.remats]
    assert names.count("addmm>add") == 2  # where the norm holds the summand


def test_the_search_is_bounded_and_stays_above_the_value():
    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    z = y.sin()
    for _ in range(MOST_NODES + 10):
        z = z.tanh()
    assert find_holder((y + z * y).grad_fn, 0) is not None  # `mul` is near
    assert find_holder((y + z.pow(2).neg()).grad_fn, 0) is None
    old = x.sin()
    newer = functional.silu(y)
    assert find_holder((y + old).grad_fn, 0) is None
    found = find_holder((y + newer.neg()).grad_fn, 0)
    assert found is not None
    assert (found.path, found.slot) == ((1, 0), "self")


def test_every_holder_keeps_its_argument_as_it_was_given():
    x, image = torch.randn(4, 6, requires_grad=True), torch.randn(2, 4, 5, 5, requires_grad=True)
    w = torch.randn(6, 6, requires_grad=True)
    made: dict[str, tuple[torch.Tensor, Any]] = {}

    def note(argument, function):
        value = argument * 1
        node = function(value).grad_fn
        made[type(node).__name__] = value, node

    note(x, lambda x: functional.layer_norm(x, (6,)))
    note(x, lambda x: functional.rms_norm(x, (6,)))
    note(image, lambda x: functional.batch_norm(x, None, None, training=True))
    note(image, lambda x: functional.group_norm(x, 2))
    note(image, lambda x: functional.conv2d(x, torch.randn(4, 4, 1, 1, requires_grad=True)))
    note(x, lambda x: torch.addmm(w[0], x, w))
    note(x, lambda x: x @ w)
    note(x, lambda x: x**3)
    note(x, lambda x: x * w[:4])
    note(x, functional.gelu)
    note(x, functional.silu)
    assert set(HOLDERS) - set(made) <= {"CudnnBatchNormBackward0", "FusedRmsNormBackward0"}
    for name, (value, node) in made.items():
        slot, edge = HOLDERS[name][0]
        assert node.next_functions[edge] == (value.grad_fn, 0)
        held = getattr(node, f"_saved_{slot}")
        assert held.data_ptr() == value.data_ptr()
        assert held.shape == value.shape


class Random(nn.Module):
    """Blocks in a random order, some of which write in place or join in other ways."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        torch.manual_seed(seed)
        kinds: list[Callable[[int], nn.Module]] = [Attention, Mlp, lambda width: Mlp(width, 0.2)]
        self.blocks = nn.ModuleList(chance.choice(kinds)(WIDTH) for _ in range(4))
        self.joins = [chance.choice(["", "", "in place", "twice", "reads"]) for _ in range(4)]

    def forward(self, x):
        side = 0.0
        for block, join in zip(self.blocks, self.joins, strict=True):
            if join == "in place":
                x = x.mul_(0.5) if x.grad_fn is not None and not x._version else x * 0.5
            y = block(x)
            if join == "twice":
                y = y + block(x)
            elif join == "reads":
                side = side + y.sin().sum()
            x = y
        return x.square().sum() + side


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("options", [{"fit": "min", "slowdown": 3.0}, {"slowdown": 3.0}], ids=str)
def test_random_residual_networks_have_the_gradients_of_plain_torch(seed, options):
    if "fit" in options:
        pytest.importorskip("scipy")
    model = Random(seed)
    x = torch.randn(2, TOKENS, WIDTH)

    def step(n):
        torch.manual_seed(n)
        for p in model.parameters():
            p.grad = None
        inputs = x.clone().requires_grad_()
        model(inputs).backward()
        return [inputs.grad, *(p.grad for p in model.parameters())]

    try:
        expected = [step(n) for n in range(8)]
    except RuntimeError:
        pytest.skip("plain torch refuses it, too")
    with cswap.install(model, min_bytes=0, **options) as handle:
        for n in range(8):
            assert all(map(torch.equal, step(n), expected[n]))
    assert handle.stats.fallbacks == 0
