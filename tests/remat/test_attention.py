"""Fused attention, which runs again where a goal asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cswap.remat.attention import ATTENTION
from cswap.remat.reads import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remat.conftest import Engine

HEADS, TIME, WIDTH = 4, 48, 32


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(products=True, max_depth=4, max_passes=48)


class Attention(nn.Module):
    """Queries, keys and values of one product, and a product of the result."""

    def __init__(self, **options):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.options = options

    def forward(self, x):
        qkv = self.qkv(x).view(len(x), -1, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, **self.options)
        return self.out(mixed.transpose(1, 2).flatten(2))


def mask_of(dtype):
    drawn = torch.rand(TIME, TIME, generator=torch.Generator().manual_seed(1))
    return drawn > 0.2 if dtype is torch.bool else torch.log(drawn).to(dtype)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"attn_mask": mask_of(torch.bool)},
    "bias": {"attn_mask": mask_of(torch.float32)},
}


def backward(module, x, engine):
    """The engine compares all that comes back bit by bit."""
    with engine.hooks():
        module(x).square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_gives_the_same_bits(name, dtype, engine):
    options = dict(OPTIONS[name])
    if name == "bias":
        options["attn_mask"] = options["attn_mask"].to(dtype)
    module = Attention(**options).to(dtype)
    backward(module, torch.randn(3, TIME, WIDTH, dtype=dtype, requires_grad=True), engine)
    assert "attention" in engine.found
    again = next(r for r in engine.remats if r.formula.operator == "attention")
    assert again.formula.product
    assert len(again.inputs) == (4 if "attn_mask" in options else 3)


def test_grouped_heads(engine):
    q = torch.randn(2, 8, TIME, 16, requires_grad=True)
    k, v = (torch.randn(2, 2, TIME, 16, requires_grad=True) for _ in range(2))
    with engine.hooks():
        y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        y.sin().sum().backward()
    assert "attention" in engine.found


def test_other_lengths_of_queries(engine):
    q = torch.randn(2, HEADS, 7, 16, requires_grad=True)
    k, v = (torch.randn(2, HEADS, TIME, 16, requires_grad=True) for _ in range(2))
    with engine.hooks():
        functional.scaled_dot_product_attention(q, k, v).sin().sum().backward()
    assert "attention" in engine.found


def test_a_product_after_it_runs_again_from_it(engine):
    module = nn.Sequential(Attention(), nn.GELU())
    backward(module, torch.randn(3, TIME, WIDTH, requires_grad=True), engine)
    assert {"attention", "addmm"} <= set(engine.found)


def test_without_products_there_is_none(make_engine):
    engine = make_engine()
    backward(Attention(), torch.randn(3, TIME, WIDTH, requires_grad=True), engine)
    assert "attention" not in engine.found


def test_queries_that_were_changed_since_raise_as_without_hooks(engine):
    q, k, v = (torch.randn(2, HEADS, TIME, 16, requires_grad=True) for _ in range(3))
    with engine.hooks():
        loss = functional.scaled_dot_product_attention(q.mul(1), k, v).sin().sum()
    assert "attention" in engine.found
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_attention_with_dropout_draws_numbers(engine, monkeypatch):
    argument = Reader.argument  # of a CPU's node, it is always 0

    def dropped(self, node, name):
        return 0.1 if name == "dropout_p" else argument(self, node, name)

    monkeypatch.setattr(Reader, "argument", dropped)
    # Of other sizes than in all tests: no formula is known.
    backward(Attention(), torch.randn(3, TIME + 1, WIDTH, requires_grad=True), engine)
    assert "addmm" in engine.found
    assert "attention" not in engine.found


@pytest.mark.parametrize("name", ATTENTION)
def test_torch_takes_the_arguments_that_rows_give(name, monkeypatch):
    """Of operators that a CPU does not have, too, by their schemas."""
    row = ATTENTION[name]
    given: dict[str, Any] = {}

    class Operators:
        def __getattr__(self, operator):
            packet = getattr(torch.ops.aten, operator, None)
            if packet is None:
                pytest.skip("this torch has no such operator")
            schema = packet.default._schema

            def run(*inputs, **named):
                names = [a.name for a in schema.arguments if not a.kwarg_only]
                given.update(zip(names, inputs, strict=False), **named)
                assert len(inputs) <= len(names)
                assert {a.name for a in schema.arguments if a.kwarg_only} >= named.keys()
                assert all(a.name in given or a.has_default_value() for a in schema.arguments)
                return (torch.zeros(()),)

            return run

    monkeypatch.setattr("cswap.remat.attention._aten", Operators())
    row.function(*"qkv", *["mask"] * (len(row.operands) - 3), 0.0, True, 0.5)
    wanted: dict[str, Any] = {
        "query": "q",
        "key": "k",
        "value": "v",
        "dropout_p": 0.0,
        "is_causal": True,
    }
    masks: dict[str, Any] = {n: "mask" for n in ("attn_mask", "attn_bias") if n in given}
    assert len(masks) == len(row.operands) - 3
    if "compute_log_sumexp" in given:
        wanted["compute_log_sumexp"] = True
    wanted.update(masks, scale=0.5)
    assert given == wanted


@pytest.mark.parametrize("name", ATTENTION)
def test_torch_knows_the_arguments(name):
    """Names of slots and numbers change with torch; a name that is missing finds nothing."""
    kind = getattr(torch._C._functions, name, None)
    if kind is None:
        pytest.skip("this torch has no such node")
    row = ATTENTION[name]
    for operand in row.operands:
        assert hasattr(kind, f"_raw_saved_{operand.slot}")
    for constant in row.constants:
        assert hasattr(kind, f"_saved_{constant}")
