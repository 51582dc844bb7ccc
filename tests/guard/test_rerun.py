"""One call of one module, run again: the same result, and nothing of anybody else's is touched."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from cswap.errors import UnsupportedError
from cswap.guard.module_rerun import Call, Copy

ROWS = torch.randn(128, 64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(64, 64),
        lambda: nn.Dropout(0.5),
        lambda: nn.BatchNorm1d(64, momentum=0.5),
        lambda: nn.BatchNorm1d(64).eval(),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.RReLU(),
    ],
    ids=["linear", "dropout", "batchnorm", "eval", "inplace", "rrelu"],
)
def test_a_call_runs_again_as_it_was_whatever_happened_meanwhile(make):
    torch.manual_seed(7)
    layer = make()
    x = ROWS.clone().requires_grad_()
    leaf = x * 1 if isinstance(layer, nn.ReLU) else x
    call = Call(layer, (leaf.detach().clone().requires_grad_(),), {})
    out = layer(leaf)
    gradient = torch.randn_like(ROWS)
    call.gradients[0] = Copy.of(gradient)
    expected = torch.autograd.grad(out, [*layer.parameters(), x], gradient)
    wanted = out.detach().clone()
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers(), x):
            tensor.fill_(9)
    layer.train(not layer.training)
    for _ in range(2):
        torch.rand(3)
        now = torch.get_rng_state()
        run = call.run(lambda x: x)
        assert torch.equal(torch.get_rng_state(), now)
        assert [torch.equal(o, wanted) for o in run.outputs if o is not None] == [True]
        torch.testing.assert_close(run.gradients, expected)


def test_backward_runs_without_autocast_as_backward_does():
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient * 2

    class Layer(nn.Module):
        def forward(self, x):
            return Looks.apply(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = Call(Layer(), (torch.ones(3, requires_grad=True),), {})
        call.gradients[0] = Copy.of(torch.ones(3))
        call.run(lambda x: x)
    assert seen == [False]


def test_parameters_and_casts_of_them_are_not_packed():
    layer = nn.Linear(64, 64)  # its weight is as large as its input
    for enabled in (False, True):
        packed: list[torch.Tensor] = []

        def pack(x, packed=packed):
            packed.append(x)
            return x

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            call = Call(layer, (ROWS[:64].clone().requires_grad_(),), {})
        call.gradients[0] = Copy.of(torch.ones(64, 64))
        call.run(pack)
        assert [torch.equal(x.float(), ROWS[:64].to(x.dtype).float()) for x in packed] == [True]


class Tables(nn.Module):
    """Multiplies by a buffer, and by a plain attribute that is learnt elsewhere."""

    table: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(8, 8))
        self.learnt = torch.randn(8, 8, requires_grad=True)
        self.plain = self.learnt * 2

    def forward(self, x):
        return x * self.table * self.plain


def test_buffers_are_not_packed_and_learnt_attributes_have_gradients():
    layer = Tables()
    packed: list[torch.Tensor] = []
    graph = weakref.ref(layer.plain)
    x = torch.randn(8, 8, requires_grad=True)
    call = Call(layer, (x,), {})
    call.gradients[0] = Copy.of(torch.ones(8, 8))
    gradients = torch.autograd.grad(layer(x).sum(), [layer.plain, x])
    activation = (x * layer.table).detach()
    layer.plain = torch.zeros(8, 8)
    assert graph() is None  # the call does not hold the user's graph

    def pack(x):
        packed.append(x)
        return x

    run = call.run(pack)
    assert [torch.equal(p, activation) for p in packed] == [True]
    torch.testing.assert_close([g for g in run.gradients if g is not None], list(gradients))


def test_a_run_without_backward_leaves_nothing_alive():
    seen = []

    def pack(x):
        seen.append(weakref.ref(x.untyped_storage()))
        return x

    call = Call(nn.Sigmoid(), (torch.ones(1000, requires_grad=True),), {})
    call.run(pack)  # no gradient has arrived: the graph is never walked
    gc.collect()
    assert seen
    assert all(s() is None for s in seen)


def test_a_call_runs_again_with_its_own_autocast_whatever_surrounds_it():
    layer = nn.Linear(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = Call(layer, (torch.randn(4, 8),), {})
    call.gradients[0] = Copy.of(torch.ones(4, 8, dtype=torch.bfloat16))
    with torch.no_grad():
        run = call.run(lambda x: x)
    assert [o.dtype for o in run.outputs if o is not None] == [torch.bfloat16]
    assert [g.dtype for g in run.gradients if g is not None] == [torch.float32] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = Call(layer, (torch.randn(4, 8),), {})
        with torch.autocast("cpu", enabled=False):
            again = call.run(lambda x: x)
            assert not torch.is_autocast_enabled("cpu")
    assert [o.dtype for o in again.outputs if o is not None] == [torch.bfloat16]


def test_a_storage_that_was_taken_away_is_not_read():
    x = torch.randn(1000)
    x.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match="taken away"):
        Copy.of(x)
    for odd in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(UnsupportedError, match="cannot be copied"):
            Copy.of(odd)
