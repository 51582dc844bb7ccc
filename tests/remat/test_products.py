"""Matrix products and convolutions, which run again where a goal asks for it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional

from cswap.remat.finder import Finder
from cswap.remat.record import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remat.conftest import Engine

    Function = Callable[[torch.Tensor], torch.Tensor]

BATCH, WIDTH = 96, 8
IMAGES = (4, 3, 12, 10)


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(products=True, max_depth=4, max_passes=48)


def conv(kind: type[nn.Module] = nn.Conv2d, **options: object) -> nn.Module:
    return kind(3, 6, kernel_size=3, **options)


MODULES: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": ("addmm", lambda: nn.Linear(WIDTH, 16), (BATCH, WIDTH)),
    "linear of a batch": ("addmm", lambda: nn.Linear(WIDTH, 16), (8, 12, WIDTH)),
    "linear without a bias": ("mm", lambda: nn.Linear(WIDTH, 16, bias=False), (BATCH, WIDTH)),
    "convolution": ("convolution", conv, IMAGES),
    "without a bias": ("convolution", lambda: conv(bias=False), IMAGES),
    "strided": ("convolution", lambda: conv(stride=2, padding=1), IMAGES),
    "dilated": ("convolution", lambda: conv(dilation=(2, 1), padding="same"), IMAGES),
    "grouped": ("convolution", lambda: conv(groups=3), IMAGES),
    "transposed": ("convolution", lambda: conv(nn.ConvTranspose2d, stride=2), IMAGES),
    "1d": ("convolution", lambda: conv(nn.Conv1d), (4, 3, 200)),
    "3d": ("convolution", lambda: conv(nn.Conv3d), (2, 3, 6, 7, 8)),
}


def backward(function: Function, x: torch.Tensor, engine: Engine) -> None:
    """The engine compares all that comes back bit by bit."""
    with engine.hooks():
        y = function(x)
        y.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_products_are_found_and_give_the_same_bits(name, dtype, engine):
    operator, make, sizes = MODULES[name]
    module = make().to(dtype)
    x = torch.randn(*sizes, dtype=dtype, requires_grad=True)
    backward(lambda x: functional.gelu(module(x)), x, engine)
    assert operator in engine.found
    assert f"{operator}>gelu" not in engine.found  # it is computed from what gelu has saved
    assert all(r.formula.product == (r.formula.operator == operator) for r in engine.remats)


@pytest.mark.parametrize("name", MODULES)
def test_activations_that_save_their_result(name, engine):
    operator, make, sizes = MODULES[name]
    module = make()
    backward(lambda x: torch.relu(module(x)), torch.randn(*sizes, requires_grad=True), engine)
    assert f"{operator}>relu" in engine.found


def test_nothing_of_it_is_found_without_products(make_engine):
    engine = make_engine()
    module = nn.Linear(WIDTH, 16)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    backward(lambda x: functional.gelu(module(x)), x, engine)
    assert engine.found == ["gelu"]


def test_a_norm_a_product_and_an_activation_are_three_operators(engine):
    norm, module = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    backward(lambda x: functional.gelu(module(norm(x))), x, engine)
    assert [r.formula.depth for r in engine.remats] == [1, 2, 3]


def test_a_batch_of_products(engine):
    a, b = torch.randn(3, 16, 8, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    backward(lambda a: torch.bmm(a, b).sin(), a, engine)
    assert "bmm" in engine.found


def test_the_products_of_all_pairs_beside_a_part_of_their_factors(engine):
    """As a recommender takes them: some of a batch of small products."""
    x = torch.randn(BATCH, 5, WIDTH, requires_grad=True)
    first, second = torch.tril_indices(5, 5, -1)

    def pairs(x):
        rows = torch.tanh(x)
        products = torch.bmm(rows, rows.transpose(1, 2))
        return torch.cat([torch.relu(x[:, 0]), products[:, first, second]], 1).sin()

    backward(pairs, x, engine)
    assert "bmm>index>cat" in engine.found


def test_a_channels_last_convolution(engine):
    module: nn.Module = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(IMAGES).contiguous(memory_format=torch.channels_last).requires_grad_()
    backward(lambda x: functional.gelu(module(x)), x, engine)
    assert "convolution" in engine.found


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_frozen_bias_is_nowhere_to_be_found(kind, engine):
    _, make, sizes = MODULES[kind]
    module = make()
    module.bias.requires_grad_(False)
    backward(lambda x: torch.sin(module(x)), torch.randn(*sizes, requires_grad=True), engine)
    assert engine.found == ["sin"]  # computed from the product, which is held


def test_a_frozen_weight_has_an_input_that_only_a_node_before_can_give(engine):
    module, norm = nn.Linear(WIDTH, 16, bias=False), nn.LayerNorm(WIDTH)
    module.weight.requires_grad_(False)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    backward(lambda x: torch.sin(module(norm(x))), x, engine)
    assert engine.found == ["layer_norm>mm", "sin"]


def test_a_weight_that_was_changed_since_raises_as_without_hooks(engine):
    module = nn.Linear(WIDTH, 16)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    with engine.hooks():
        loss = functional.gelu(module(x)).sum()
    assert "addmm" in engine.found
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_precision_of_forward_counts(engine):
    module = nn.Linear(64, 128)
    x = torch.randn(512, 64, requires_grad=True)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")  # has other bits where the processor can
        with engine.hooks():
            loss = functional.gelu(module(x)).sum()
        torch.set_float32_matmul_precision("highest")
        loss.backward()
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
    assert [r.settings.precision for r in engine.remats if r.formula.product] == ["medium"]


@pytest.mark.parametrize(("name", "found"), [("linear", "addmm"), ("convolution", None)])
def test_of_products_cudnn_tunes_convolutions_only(name, found, engine, monkeypatch):
    _, make, sizes = MODULES[name]
    finder = Finder(products=True)
    with engine.hooks():
        y = make()(torch.randn(*sizes, requires_grad=True))
    assert finder.find(y) is not None

    def of(tensor):
        return replace(Layout.of(tensor), device=torch.device("cuda"))

    monkeypatch.setattr("cswap.remat.search.Layout", SimpleNamespace(of=of))
    # Another test may have imported torch's own, after which the flag alone cannot be set.
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        remat = finder.find(y)
    assert (remat and remat.formula.operator) == found


def test_a_precision_that_torch_does_not_tell(engine, monkeypatch):
    def unknown():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr("cswap.remat.settings._get_precision", unknown)
    module = nn.Linear(64, 128)
    x = torch.randn(512, 64, requires_grad=True)
    backward(lambda x: functional.gelu(module(x)), x, engine)
    assert engine.found == ["gelu"]
