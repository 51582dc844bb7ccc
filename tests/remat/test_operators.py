"""Every operator of the table, bit by bit: what is computed again is what was saved."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from cswap.remat.record import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remat.conftest import Engine

    Function = Callable[..., torch.Tensor]
    Kind = tuple[torch.dtype, str]

REAL = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

UNARY: dict[str, tuple[str, Function]] = {
    "gelu": ("gelu", functional.gelu),
    "gelu_tanh": ("gelu", lambda x: functional.gelu(x, approximate="tanh")),
    "silu": ("silu", functional.silu),
    "mish": ("mish", functional.mish),
    "hardswish": ("hardswish", functional.hardswish),
    "hardsigmoid": ("hardsigmoid", functional.hardsigmoid),
    "hardtanh": ("hardtanh", lambda x: functional.hardtanh(x, -0.3, 0.2)),
    "relu6": ("hardtanh", functional.relu6),
    "leaky_relu": ("leaky_relu", lambda x: functional.leaky_relu(x, 0.07)),
    "elu": ("elu", lambda x: functional.elu(x, 0.7)),
    "selu": ("elu", functional.selu),
    "celu": ("celu", lambda x: functional.celu(x, 0.7)),
    "softplus": ("softplus", lambda x: functional.softplus(x, 1.7, 0.4)),
    "glu": ("glu", lambda x: functional.glu(x[..., : x.shape[-1] // 2 * 2])),
    "relu": ("relu", torch.relu),
    "tanh": ("tanh", torch.tanh),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "exp": ("exp", torch.exp),
    "sqrt": ("sqrt", lambda x: torch.sqrt(torch.exp(x))),
    "rsqrt": ("rsqrt", lambda x: torch.rsqrt(torch.exp(x))),
    "reciprocal": ("reciprocal", torch.reciprocal),
    "softmax": ("softmax", lambda x: torch.softmax(x, -2)),
    "log_softmax": ("log_softmax", lambda x: torch.log_softmax(x, -1)),
    "neg": ("neg", torch.neg),
    "abs": ("abs", torch.abs),
    "pow": ("pow", lambda x: x.pow(3)),
    "pow_half": ("pow", lambda x: x.exp().pow(0.7)),
    "sin": ("sin", torch.sin),
    "cos": ("cos", torch.cos),
    "log": ("log", lambda x: x.exp().log()),
    "log1p": ("log1p", torch.log1p),
    "erf": ("erf", torch.erf),
    "clamp": ("clamp", lambda x: x.clamp(-0.3, 0.4)),
    "scale": ("mul", lambda x: x * 0.3),
    "scale_int": ("mul", lambda x: x * 3),
    "divide": ("div", lambda x: x / 3.0),
    "contiguous": (
        "clone",
        lambda x: x.transpose(0, -1).clone(memory_format=torch.contiguous_format),
    ),
    "transposed": ("clone", lambda x: x.movedim(-1, 0).clone()),
    "reshape": ("clone", lambda x: x.transpose(-2, -1).reshape(x.shape[0], -1)),
    "flatten": ("clone", lambda x: x.expand(2, *x.shape).flatten(0, 1)),
    "index_select": ("index_select", lambda x: x.index_select(-1, torch.tensor([0, 1, 1, 0]))),
    "index": ("index", lambda x: x[..., torch.tensor([0, 1, 1])]),
    "index_mask": ("index", lambda x: x[..., torch.arange(x.shape[-1]) % 2 == 0]),
    "index_apart": ("index", lambda x: x[torch.zeros(3, dtype=torch.long), :, torch.arange(3) % 2]),
    "index_none": ("index", lambda x: x[None, :, None, torch.zeros(2, 1, dtype=torch.long)]),
    "repeat": ("repeat", lambda x: x.repeat(2, 1, *x.shape[2:])),
    "roll": ("roll", lambda x: torch.roll(x, (-2, 1), (0, -1))),
    "roll_flat": ("roll", lambda x: torch.roll(x, 3)),
    "flip": ("flip", lambda x: x.flip(-1)),
    "upsample": ("upsample", lambda x: functional.interpolate(x, scale_factor=2)),
    "upsample_exact": (
        "upsample",
        lambda x: functional.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
    ),
    "upsample_cube": (
        "upsample",
        lambda x: functional.interpolate(
            x[None, None, -3:, -3:, -3:].flatten(1, -4), scale_factor=2
        ),
    ),
    "max_pool": ("max_pool", lambda x: functional.max_pool2d(x, 2, 1, 1, ceil_mode=True)),
    "double": ("cast", lambda x: x.to(torch.float64 if x.dtype != torch.float64 else torch.half)),
    "bfloat16": (
        "cast",
        lambda x: x.to(torch.bfloat16 if x.dtype != torch.bfloat16 else torch.float),
    ),
}

BINARY: dict[str, tuple[str, Function]] = {
    "add": ("add", lambda a, b: torch.add(a, b, alpha=0.3)),
    "sub": ("sub", lambda a, b: torch.sub(a, b, alpha=3)),
    "mul": ("mul", torch.mul),
    "div": ("div", torch.div),
    "maximum": ("maximum", torch.maximum),
    "minimum": ("minimum", torch.minimum),
    "addcmul": ("addcmul", lambda a, b: torch.addcmul(a, b, a, value=0.7)),
    "cat": ("cat", lambda a, b: torch.cat((a, b, a), -1)),
    "stack": ("stack", lambda a, b: torch.stack((a, b))),
    "where": ("where", lambda a, b: torch.where(a.detach() > 0, a, b)),
    "broadcast": ("mul", lambda a, b: a * b[:1]),
    "dropout": ("mul", lambda a, b: functional.dropout(a, 0.3) + 0 * b),
    "prelu": ("prelu", lambda a, b: functional.prelu(a, b.flatten()[: a.shape[1]])),
}

LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "contiguous": lambda dtype: torch.randn(3, 5, 42).to(dtype),
    "odd": lambda dtype: torch.randn(2, 7, 134).to(dtype)[:, :, :133].contiguous(),
    "transposed": lambda dtype: torch.randn(3, 46, 5).to(dtype).transpose(1, 2),
    "gaps": lambda dtype: torch.randn(3, 5, 84).to(dtype)[:, :, ::2],
    "images": lambda dtype: (
        torch.randn(2, 6, 4, 10).to(dtype).contiguous(memory_format=torch.channels_last)
    ),
    "one": lambda dtype: torch.randn(1, 1, 2).to(dtype),
}


def held(x: torch.Tensor) -> torch.Tensor:
    """A value that its own node saves, with the layout of ``x``."""
    return torch.tanh(x)


def saver(y: torch.Tensor) -> torch.Tensor:
    """Saves its argument."""
    return y * torch.ones((), dtype=y.dtype, requires_grad=True)


def gradients(engine: Engine, function: Function, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """Of a loss whose operator saves the function's result."""
    torch.manual_seed(1)
    with engine.hooks():
        loss = saver(function(*leaves)).abs().sum()
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def check(
    engine: Engine, storing: Engine, operator: str, function: Function, *leaves: torch.Tensor
) -> None:
    mine = gradients(engine, function, *leaves)
    theirs = gradients(storing, function, *leaves)
    where = (operator, leaves[0].dtype, leaves[0].stride(), engine.saved)
    assert operator in engine.found, where
    assert all(map(same_bits, mine, theirs)), where


def shares_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


FEW = [*((torch.float32, layout) for layout in LAYOUTS), *((dtype, "odd") for dtype in REAL[1:])]
ALL = list(product(REAL, LAYOUTS))

kinds = pytest.mark.parametrize(
    "kinds", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"]
)


@kinds
@pytest.mark.parametrize("case", UNARY)
def test_of_one_tensor(
    case: str, kinds: list[Kind], make_engine: Callable[[], Engine], storing: Engine
) -> None:
    operator, function = UNARY[case]
    for dtype, layout in kinds:
        x = leaf(LAYOUTS[layout](dtype))
        if operator == "clone" and shares_memory(x, function(x)):
            continue
        check(make_engine(), storing, operator, lambda x: function(held(x)), x)


@kinds
@pytest.mark.parametrize("case", BINARY)
def test_of_two_tensors(
    case: str, kinds: list[Kind], make_engine: Callable[[], Engine], storing: Engine
) -> None:
    operator, function = BINARY[case]
    for dtype, layout in kinds:
        x, y = (leaf(LAYOUTS[layout](dtype)) for _ in range(2))
        check(make_engine(), storing, operator, lambda x, y: function(held(x), held(y)), x, y)


@pytest.mark.parametrize("case", ["neg", "scale", "exp", "tanh", "reciprocal", "contiguous", "sin"])
def test_complex(case: str, engine: Engine, storing: Engine) -> None:
    operator, function = UNARY[case]
    x = leaf(torch.randn(3, 5, 42, dtype=torch.complex64))
    check(engine, storing, operator, lambda x: function(held(x)), x)


def test_conjugated_arguments(engine: Engine, storing: Engine) -> None:
    x, y = (leaf(torch.randn(30, 7, dtype=torch.complex64)) for _ in range(2))
    check(engine, storing, "mul", lambda x, y: held(x).conj() * held(y), x, y)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 1.0])
def test_native_dropout_runs_again_with_its_mask(
    engine: Engine, storing: Engine, share: float, dtype: torch.dtype
) -> None:
    x = leaf(LAYOUTS["odd"](dtype))

    def dropped(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return torch.native_dropout(held(x), share, True)[0]

    check(engine, storing, "dropout", dropped, x)


def test_native_dropout_that_does_not_train_gives_its_argument(
    engine: Engine, storing: Engine
) -> None:
    x = leaf(LAYOUTS["odd"](torch.float32))
    for trains in (True, False):  # the node does not say which
        with engine.hooks():
            y = torch.native_dropout(held(x), 0.3, trains)[0]
            torch.autograd.grad(saver(y).sum(), x)  # the engine compares bits
    assert engine.found.count("dropout") == 2


def test_native_dropout_that_may_drop_nothing_is_stored(engine: Engine) -> None:
    x = leaf(torch.randn(1000))
    gradients(engine, lambda x: torch.native_dropout(held(x), 0.06, True)[0], x)
    assert "dropout" not in engine.found
    gradients(engine, lambda x: torch.native_dropout(held(x), 0.07, True)[0], x)
    assert "dropout" in engine.found
