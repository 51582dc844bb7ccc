"""Whole blocks: bits of gradients, the operators that are found, and the bytes that are held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional

from cswap.remat.record import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remat.conftest import Engine

WIDTH = 32
TOKENS = 24
BATCH = 2


class Attention(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, *, causal: bool, rotary: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal, self.rotary = causal, rotary
        angles = torch.outer(torch.arange(TOKENS), 100.0 ** -torch.linspace(0, 1, 4))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat((-b, a), -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        if self.rotary:
            q, k = self.turn(q), self.turn(k)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """Written by hand, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def mlp(dropout: float = 0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH)
    )


class PreNorm(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.attention, self.mlp = norm(), norm(), attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class PostNorm(PreNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm_1(x + self.attention(x))
        return self.norm_2(x + self.mlp(x))  # type: ignore[no-any-return]


def layer_norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


class Residual(nn.Module):
    """Of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norms[0](self.convs[0](x)))
        y = self.norms[1](self.convs[1](y))
        y += x
        return self.relu(y)  # type: ignore[no-any-return]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: PreNorm(layer_norm, Attention(causal=True), mlp()),
    "gpt_dropout": lambda: PreNorm(layer_norm, Attention(causal=True), mlp(0.1)),
    "bert": lambda: PostNorm(layer_norm, Attention(causal=False), mlp()),
    "vit": lambda: PreNorm(layer_norm, Attention(causal=False), mlp()),
    "llama": lambda: PreNorm(RMSNorm, Attention(causal=True, rotary=True), SwiGLU()),
    "llama_fused": lambda: PreNorm(
        lambda: nn.RMSNorm(WIDTH), Attention(causal=True, rotary=True), SwiGLU()
    ),
}

FOUND = {
    "gpt": ["layer_norm", "layer_norm", "gelu"],
    "gpt_dropout": ["layer_norm", "layer_norm", "gelu>mul"],
    "bert": ["layer_norm", "gelu"],
    "vit": ["layer_norm", "layer_norm", "gelu"],
    "llama": ["mul", "mul", "mul", "mul", "silu", "mul"],
    "llama_fused": ["mul", "mul", "mul", "mul", "silu", "mul"],
}


HELD_BYTES = {
    "gpt": (399_360, 251_904),
    "gpt_dropout": (497_664, 350_208),
    "bert": (399_360, 258_048),
    "vit": (399_360, 251_904),
    "llama": (588_096, 354_624),
    "llama_fused": (588_096, 354_624),
}
"""Of four blocks, by the name of the block: everything stored, and with recomputation."""


def gradients(one: Engine, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    one.own(model)
    with one.hooks():
        out = model(x)
    out.backward(torch.cos(out.detach().float()).to(out.dtype))
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients(
    name: str, dtype: torch.dtype, make_engine: Callable[..., Engine], storing: Engine
) -> None:
    block = nn.Sequential(BLOCKS[name](), BLOCKS[name]()).to(dtype)
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype)
    engine = make_engine(least_numel=BATCH * TOKENS * WIDTH)
    mine, theirs = gradients(engine, block, x), gradients(storing, block, x)
    assert all(map(same_bits, mine, theirs))
    if dtype is torch.float32:
        assert engine.found[-len(FOUND[name]) :] == FOUND[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_a_resnet(
    dtype: torch.dtype, make_engine: Callable[..., Engine], storing: Engine
) -> None:
    net = nn.Sequential(Residual(), Residual(), Residual()).to(dtype)
    x = torch.randn(2, 8, 12, 12, dtype=dtype)
    engine = make_engine(least_numel=x.numel())
    assert all(map(same_bits, gradients(engine, net, x), gradients(storing, net, x)))
    inner, outer = "batch_norm>relu", "batch_norm>add>relu"
    # The first sum has the network's input in it, which nobody saves; the third would be the
    # fourth operator of a chain.
    assert engine.found == [inner, inner, outer, inner]


@pytest.mark.parametrize("name", BLOCKS)
def test_held_bytes(name: str, make_engine: Callable[..., Engine], storing: Engine) -> None:
    net = nn.Sequential(*(BLOCKS[name]() for _ in range(4)))
    x = torch.randn(BATCH, TOKENS, WIDTH)
    engine = make_engine(least_numel=x.numel())
    for one in (engine, storing):
        gradients(one, net, x)
    assert (storing.held_bytes, engine.held_bytes) == HELD_BYTES[name]
