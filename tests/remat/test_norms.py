"""Norms: their epsilon is not saved, their statistics are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from cswap.errors import InternalError
from cswap.remat import norms
from cswap.remat.norms import (
    TIMES_TO_COMPARE,
    Epsilons,
    batch_norm,
    group_norm,
    group_norm_of_statistics,
    layer_norm,
    layer_norm_of_statistics,
    rms_norm,
)
from cswap.remat.operators import _ROWS, _WITHOUT_EPS
from cswap.remat.record import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remat.conftest import Engine


def saver(y: torch.Tensor) -> torch.Tensor:
    return y * torch.ones((), dtype=y.dtype, requires_grad=True)


def check(
    engine: Engine,
    storing: Engine,
    function: Callable[..., torch.Tensor],
    *leaves: torch.Tensor | None,
) -> None:
    """Bits of all gradients; `Again.unpack` compares those of the saved tensors."""
    grads = []
    wanted = [leaf for leaf in leaves if leaf is not None]
    for one in (engine, storing):
        with one.hooks():
            loss = saver(function(*leaves)).sum()
        grads.append(torch.autograd.grad(loss, wanted))
    assert all(map(same_bits, *grads))


def affine(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes).to(dtype).requires_grad_()


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.0, 0.1, 3.7e-4, 1e-30, 12345.0])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_layer_norm(
    dtypes: tuple[torch.dtype, torch.dtype], eps: float, engine: Engine, storing: Engine
) -> None:
    x = torch.randn(5, 7, 33).to(dtypes[0]).requires_grad_()
    weight, bias = affine(dtypes[1], 33), affine(dtypes[1], 33)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (33,), weight, bias, eps)

    check(engine, storing, function, x, weight, bias)
    assert engine.found == ["layer_norm"]


@pytest.mark.parametrize(("weight", "bias"), [(True, False), (False, False)])
def test_layer_norm_without_weights(
    weight: bool, bias: bool, engine: Engine, storing: Engine
) -> None:
    x = torch.randn(4, 6, 3, 5, requires_grad=True)
    w = affine(torch.float32, 3, 5) if weight else None
    check(engine, storing, lambda x, w: functional.layer_norm(x, (3, 5), w), x, w)
    assert engine.found == ["layer_norm"]


def test_layer_norm_of_rows_that_have_no_number(engine: Engine) -> None:
    x = torch.randn(6, 16)
    x[1], x[2, 3], x[3, 4], x[4] = 0, torch.nan, torch.inf, 1e30
    x.requires_grad_()
    with engine.hooks():
        saver(functional.layer_norm(x, (16,), eps=3e-4)).sum().backward()
    assert engine.found == ["layer_norm"]


def test_statistics_of_16_bits_prove_nothing(engine: Engine) -> None:
    x = torch.randn(6, 16, dtype=torch.bfloat16, requires_grad=True)
    for weight in (affine(torch.bfloat16, 16), None, torch.ones(16, dtype=torch.bfloat16)):
        with engine.hooks():
            saver(functional.layer_norm(x, (16,), weight))
    assert engine.found == []


def test_many_epsilons_in_one_model(engine: Engine, storing: Engine) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for n in range(20):
            x = functional.layer_norm(torch.tanh(x), (8,), eps=0.01 + n * 1e-3)
        return x

    check(engine, storing, function, torch.randn(9, 8, requires_grad=True))
    assert engine.found == ["layer_norm>tanh"] * 10 + ["layer_norm"]


def test_epsilons_of_a_model_are_tried_first_and_are_bounded() -> None:
    epsilons = Epsilons()
    epsilons.learn(n / 100 for n in range(1000))
    assert next(iter(epsilons)) == 9.99
    assert len(list(epsilons)) < 20


def test_statistics_of_another_input_are_refused() -> None:
    x = torch.randn(4, 8)
    _, mean, rstd = torch.native_layer_norm(x, (8,), None, None, 1e-5)
    with pytest.raises(InternalError, match="no epsilon"):
        layer_norm(x, None, None, mean, rstd.flip(0), (8,))
    with pytest.raises(InternalError, match="means"):
        layer_norm(x, None, None, mean.flip(0), rstd, (8,))


BATCHES: dict[str, tuple[int, ...]] = {
    "rows": (65, 33),
    "one row each": (2, 5),
    "sequences": (4, 8, 101),
    "images": (7, 16, 5, 3),
    "one pixel": (3, 16, 1, 1),
    "many channels": (2, 300, 4, 4),
    "volumes": (2, 3, 4, 5, 6),
}


@pytest.mark.parametrize("order", [torch.contiguous_format, "channels last"], ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", BATCHES.values(), ids=BATCHES)
def test_a_batch_norm_by_its_statistics_has_the_same_bits(sizes, dtypes, order):
    x = (3 * torch.randn(sizes) + 1).to(dtypes[0])
    if order == "channels last":
        orders = {4: torch.channels_last, 5: torch.channels_last_3d}
        order = orders.get(len(sizes), torch.contiguous_format)
    x = x.contiguous(memory_format=order)
    weight, bias = (torch.randn(sizes[1]).to(dtypes[1]) for _ in range(2))
    for hard in (False, True):
        if hard:  # a channel of equal values, and some that are no numbers
            x.select(1, 0).fill_(2.5)
            x.select(1, 1).flatten()[0] = torch.inf
            x.select(1, 2).flatten()[-1] = torch.nan
        y, mean, invstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
        assert same_bits(batch_norm(x, weight, bias, mean, invstd, 1e-5), y)


def test_a_batch_norm_with_strided_weights() -> None:
    x = 3 * torch.randn(8, 16, 32, 32) + 50
    table = torch.randn(16, 4)
    for weight, bias in ((table[:, 0].contiguous(), table[:, 1]), (table[:, 2], table[:, 3])):
        y, mean, invstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
        assert same_bits(batch_norm(x, weight, bias, mean, invstd, 1e-5), y)


def test_ones_are_kept_for_later_norms_unless_those_may_not_use_them(monkeypatch) -> None:
    monkeypatch.setattr(norms, "_ONES", {})
    monkeypatch.setattr(norms, "MOST_ONES", 2)
    mean = torch.randn(7)
    with torch.inference_mode():
        assert norms._ones(mean).is_inference()
    with FakeTensorMode():
        assert type(norms._ones(torch.empty(7))) is FakeTensor
    first = norms._ones(mean)
    assert type(first) is torch.Tensor
    assert torch.equal(first, torch.ones(7))
    assert norms._ones(torch.randn(7)) is first
    assert norms._ones(mean.double()).dtype is torch.float64
    norms._ones(torch.randn(9))
    assert len(norms._ONES) == 1


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "images": lambda x: x.contiguous(memory_format=torch.channels_last),
    "gaps": lambda x: x[:, :, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_batch_norm_and_relu(
    in_place: bool, dtype: torch.dtype, layout: str, engine: Engine, storing: Engine
) -> None:
    x = LAYOUTS[layout](torch.randn(3, 8, 6, 10).to(dtype)).requires_grad_()
    weight, bias = affine(dtype, 8), affine(dtype, 8)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mean, var = torch.zeros(8, dtype=dtype), torch.ones(8, dtype=dtype)
        y = functional.batch_norm(x, mean, var, weight, bias, training=True, eps=1e-3)
        return functional.relu(y, inplace=in_place)

    engine.least_numel = 100
    check(engine, storing, function, x, weight, bias)
    found = ["batch_norm>relu"] if in_place else ["batch_norm>relu", "batch_norm>relu"]
    assert set(engine.found) == set(found)


def test_batch_norm_in_evaluation_or_without_a_trained_bias_is_stored(engine: Engine) -> None:
    x, weight = torch.randn(3, 8, 40, requires_grad=True), affine(torch.float32, 8)
    mean, var, frozen = torch.zeros(8), torch.ones(8), torch.ones(8)
    engine.least_numel = 100
    with engine.hooks():
        saver(functional.batch_norm(x, mean, var, weight, affine(torch.float32, 8)))
        saver(functional.batch_norm(x, mean, var, weight, frozen, training=True))
        saver(functional.batch_norm(x, mean, var, weight, None, training=True))
        saver(functional.instance_norm(x))
    assert engine.found == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_group_norm(dtype: torch.dtype, layout: str, engine: Engine, storing: Engine) -> None:
    x = LAYOUTS[layout](torch.randn(3, 8, 6, 10).to(dtype)).requires_grad_()
    weight, bias = affine(dtype, 8), affine(dtype, 8)
    engine.least_numel = 100
    check(engine, storing, lambda x, w, b: functional.group_norm(x, 4, w, b, 1e-4), x, weight, bias)
    node = functional.group_norm(x, 4, weight, bias).grad_fn
    # From torch 2.14 on, the node does not save epsilon, and here the statistics are rounded.
    lacks_eps = dtype is torch.bfloat16 and not hasattr(node, "_saved_eps")
    assert set(engine.found) == (set() if lacks_eps else {"group_norm"})


@pytest.mark.parametrize("eps", [1e-5, 3e-3, 0.0])
@pytest.mark.parametrize("layout", ["contiguous", "images"])
def test_a_group_norm_whose_epsilon_is_not_saved(layout: str, eps: float) -> None:
    x = LAYOUTS[layout](torch.randn(3, 8, 6, 10))
    weight, bias, sizes = torch.rand(8), torch.rand(8), (3, 8, 60, 4)
    y, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, eps)
    assert same_bits(group_norm(x, weight, bias, mean, rstd, *sizes), y)
    with pytest.raises(InternalError, match="means"):
        group_norm(x + 1, weight, bias, mean, rstd, *sizes)
    with pytest.raises(InternalError, match="no epsilon"):
        group_norm(x, weight, bias, mean, -rstd, *sizes)


def test_a_bias_may_change_before_backward(engine: Engine) -> None:
    x, weight, bias = torch.randn(3, 8, 64), affine(torch.float32, 8), affine(torch.float32, 8)
    scale = torch.ones((), requires_grad=True)
    engine.least_numel = 100
    with engine.hooks():
        y = functional.group_norm(x.requires_grad_(), 4, weight, bias)
        loss = (y * scale).sum()
    want = y.detach().sum()
    with torch.no_grad():
        bias.add_(1)
    loss.backward()
    assert engine.found == ["group_norm"]
    assert scale.grad is not None
    assert torch.allclose(scale.grad, want)


def test_the_epsilon_of_a_weight_is_known_after_some_comparisons() -> None:
    epsilons, weight, other = Epsilons(), torch.ones(8), torch.ones(8)
    for value in (1e-5, 1e-6, 1e-6, 1e-6):
        epsilons.found(value, weight)
        epsilons.found(value)
        assert epsilons.known(weight) is None
    epsilons.found(1e-6, weight)
    assert epsilons.known(weight) == 1e-6
    assert epsilons.known(other) is None
    assert epsilons.known(None) is None


def test_the_fused_rms_norm() -> None:
    x, weight = torch.randn(6, 16), torch.rand(16)
    for eps in (1e-6, 3e-3):
        want, rstd = torch.ops.aten._fused_rms_norm(x, [16], weight, eps)
        assert same_bits(rms_norm(x, weight, rstd, [16]), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_that_a_lossy_codec_has_changed(dtype: torch.dtype, engine: Engine) -> None:
    x, weight, bias = torch.randn(6, 16), affine(torch.float32, 16), affine(torch.float32, 16)
    with engine.hooks():
        saver(functional.layer_norm(x.to(dtype).requires_grad_(), (16,), weight, bias))
    (remat,) = engine.remats
    inputs = [packed.unpack() for packed in remat.inputs]  # type: ignore[attr-defined]
    want = remat.run(inputs)
    assert torch.allclose(remat.run(inputs, exact=False), want, rtol=1e-2, atol=1e-2)
    inputs[0] = inputs[0] + 0.01
    with pytest.raises(InternalError, match="means"):
        remat.run(inputs)
    assert torch.allclose(remat.run(inputs, exact=False), want, rtol=0.1, atol=0.1)


def test_cudnns_batch_norm_runs_as_cudnn_ran_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cuDNN without a GPU: its arguments are looked at, and the names of its node."""
    row = _ROWS["CudnnBatchNormBackward0"]
    functions: Any = torch._C._functions
    node = functions.CudnnBatchNormBackward0
    slots = [operand.slot for operand in row.operands if operand.slot is not None]
    assert all(hasattr(node, f"_saved_{name}") for name in (*slots, *row.constants, "training"))
    seen = []

    def cudnn(*given: Any) -> tuple[torch.Tensor, ...]:
        seen.append(given)
        return torch.native_batch_norm(*given)

    monkeypatch.setattr(torch, "cudnn_batch_norm", cudnn)
    x, weight, bias = torch.randn(4, 3, 5, 5), torch.randn(3), torch.randn(3)
    want = functional.batch_norm(x, None, None, weight, bias, training=True, eps=1e-3)
    assert same_bits(row.function(x, weight, bias, 1e-3), want)
    assert seen == [(x, weight, bias, None, None, True, 0.0, 1e-3)]
    # The schema's order of arguments.
    names = [a.name for a in torch.ops.aten.cudnn_batch_norm.default._schema.arguments]
    assert names[:3] == ["input", "weight", "bias"]
    assert names[-3:] == ["training", "exponential_average_factor", "epsilon"]


def test_norms_that_compare_statistics_have_another_function_for_rounded_inputs() -> None:
    rows = [*_ROWS.values(), *_WITHOUT_EPS.values()]
    comparing = [row for row in rows if row.function in {layer_norm, rms_norm, group_norm}]
    assert len(comparing) == 3
    assert all(row.inexact is not None for row in comparing)


@pytest.mark.parametrize("transposed", [False, True])
def test_layer_norm_of_statistics(transposed: bool) -> None:
    x = torch.randn(7, 5, 33).transpose(0, 1) if transposed else torch.randn(5, 7, 33)
    weight, bias = torch.randn(33), torch.randn(33)
    for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
        want, mean, rstd = torch.native_layer_norm(x, [33], w, b, 1e-5)
        got = layer_norm_of_statistics(x, w, b, mean, rstd, [33])
        assert got.stride() == want.stride()
        assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("sizes", [(4, 6), (4, 6, 5), (4, 6, 5, 3)], ids=str)
def test_group_norm_of_statistics(order: torch.memory_format, sizes: tuple[int, ...]) -> None:
    if order is torch.channels_last and len(sizes) != 4:
        pytest.skip("images only")
    x = torch.randn(sizes).to(memory_format=order)
    weight, bias = torch.randn(6), torch.randn(6)
    n, c, hxw = 4, 6, x.numel() // 24
    want, mean, rstd = torch.native_group_norm(x, weight, bias, n, c, hxw, 2, 1e-5)
    got = group_norm_of_statistics(x, weight, bias, mean, rstd, n, c, hxw, 2)
    assert got.stride() == want.stride()
    assert torch.allclose(got, want, atol=1e-5)


def test_weights_in_one_storage_have_epsilons_of_their_own():
    """As flat parameters of a sharded optimizer."""
    epsilons, flat = Epsilons(), torch.ones(16)
    first, second = flat[:8], flat[8:]
    for _ in range(TIMES_TO_COMPARE):
        epsilons.found(1e-5, first)
    assert epsilons.known(first) == 1e-5
    assert epsilons.known(second) is None
