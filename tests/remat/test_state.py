"""The state of torch, ways to run backward, limits, and what a record keeps alive."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cswap.errors import InternalError
from cswap.remat.record import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.remat.conftest import Engine


def make_leaf(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, requires_grad=True)


def saver(y: torch.Tensor) -> torch.Tensor:
    """Saves its argument."""
    return y * torch.ones((), dtype=y.dtype, requires_grad=True)


def held(x: torch.Tensor) -> torch.Tensor:
    """A value that its own node saves."""
    return torch.tanh(x)


# ------------------------------------------------------------------- the state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + self.down(functional.silu(h) * torch.sigmoid(h))  # type: ignore[no-any-return]


def step(
    one: Engine, net: nn.Module, x: torch.Tensor, backward: Callable[[torch.Tensor], None]
) -> list[torch.Tensor]:
    net.zero_grad()
    with one.hooks():
        loss = net(x).float().square().mean()
    backward(loss)
    return [p.grad for p in net.parameters() if p.grad is not None]


def plain_backward(loss: torch.Tensor) -> None:
    loss.backward()


def check_steps(
    engine: Engine,
    storing: Engine,
    backward: Callable[[torch.Tensor], None] = plain_backward,
    net: nn.Module | None = None,
) -> None:
    net = Net() if net is None else net
    x = torch.randn(7, 11, 24)
    assert all(
        map(same_bits, step(engine, net, x, backward), step(storing, net, x, plain_backward))
    )


def test_autocast(engine: Engine, storing: Engine) -> None:
    def backward(loss: torch.Tensor) -> None:  # of which autocast must change nothing
        with torch.autocast("cpu", torch.float16):
            loss.backward()

    net = Net()
    x = torch.randn(7, 11, 24)
    grads: list[Any] = []
    for one in (engine, storing):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), one.hooks():
            loss = net(x).float().square().mean()
        backward(loss)
        grads.append([p.grad for p in net.parameters()])
    assert all(map(same_bits, *grads))
    assert engine.found == ["layer_norm>cast", "silu", "mul"]


def test_a_norm_in_full_precision_under_autocast(engine: Engine, storing: Engine) -> None:
    class Mixed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                y = self.norm(x.float())
            return self.down(torch.relu(self.up(y)))  # type: ignore[no-any-return]

    with torch.autocast("cpu", torch.bfloat16):
        check_steps(engine, storing, net=Mixed())
    assert engine.found == ["layer_norm>cast"]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms(engine: Engine, storing: Engine) -> None:
    def backward(loss: torch.Tensor) -> None:
        with deterministic():  # fills fresh memory with NaN
            loss.backward()

    check_steps(engine, storing, backward)


def test_the_number_of_threads(engine: Engine) -> None:
    x = make_leaf(100_003)  # sigmoid's bits depend on the number of threads
    torch.set_num_threads(3)
    with engine.hooks():
        loss = saver(torch.sigmoid(held(x))).sum()
    torch.set_num_threads(1)
    loss.backward()  # `Again.unpack` compares
    assert engine.found == ["sigmoid"]
    assert torch.get_num_threads() == 1


def test_another_thread(engine: Engine) -> None:
    x = make_leaf(100_003)
    torch.set_num_threads(2)
    with engine.hooks():
        loss = saver(functional.silu(held(x))).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert x.grad is not None


def test_onednn(engine: Engine) -> None:
    x = make_leaf(100_003)  # GELU has a kernel of oneDNN's, whose bits are others
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(not enabled)
    with engine.hooks():
        loss = saver(functional.gelu(held(x))).sum()
    torch._C._set_mkldnn_enabled(enabled)
    loss.backward()
    assert engine.found == ["gelu"]


def test_an_error_leaves_the_state_alone(engine: Engine) -> None:
    x = make_leaf(40)
    torch.set_num_threads(2)
    with engine.hooks():
        saver(functional.gelu(held(x)))
    (remat,) = engine.remats
    torch.set_num_threads(1)
    with pytest.raises(InternalError, match="gelu gave"):
        remat.run([torch.randn(41)])
    with pytest.raises(TypeError):
        remat.run([None])  # type: ignore[list-item]
    assert torch.get_num_threads() == 1
    assert torch.is_grad_enabled()
    with torch.autocast("cpu"):
        remat.run([torch.randn(40)])
        assert torch.is_autocast_enabled("cpu")


# ----------------------------------------------------------------- the backward


def test_retain_graph(engine: Engine, storing: Engine) -> None:
    def backward(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        for p in net.parameters():
            p.grad = None
        loss.backward()

    net = Net()
    check_steps(engine, storing, backward, net)
    unpacked = [(p.remat.formula.operator, p.unpacked) for p in engine.again.values()]
    # The product asks for SiLU's result, which its own node asks for, too.
    assert unpacked == [("layer_norm", 2), ("silu", 4), ("mul", 2)]


def test_double_backward(engine: Engine, storing: Engine) -> None:
    net, x = Net(), make_leaf(7, 11, 24)
    grads: list[Any] = []
    for one in (engine, storing):
        with one.hooks():
            loss = net(x).square().mean()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            penalty = grad.square().sum()
        grads.append(torch.autograd.grad(penalty, [x, *net.parameters()], allow_unused=True))
    mine, theirs = grads
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or same_bits(a, b)


def test_checkpointed_regions(engine: Engine, storing: Engine) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList([Net(), Net(), Net()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.nets[0](x)
            x = checkpoint(self.nets[1], x, use_reentrant=False)
            return self.nets[2](x)  # type: ignore[no-any-return]

    check_steps(engine, storing, net=Checkpointed())
    assert engine.found.count("layer_norm") == 2


def test_hooks_inside_of_a_checkpointed_region(engine: Engine, storing: Engine) -> None:
    net, x = Net(), make_leaf(7, 11, 24)
    grads: list[torch.Tensor] = []
    for one in (engine, storing):

        def inside(x: torch.Tensor, one: Engine = one) -> torch.Tensor:
            with one.hooks():
                return net(x)  # type: ignore[no-any-return]

        loss = checkpoint(inside, x, use_reentrant=True).square().sum()
        x.grad = None
        loss.backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert same_bits(*grads)


# ---------------------------------------------------------------------- limits


def test_the_length_of_a_chain(make_engine: Callable[..., Engine]) -> None:
    def function() -> torch.Tensor:
        x = held(make_leaf(400))
        for _ in range(5):
            x = functional.silu(x)  # saves its input
        return saver(x)

    for most, found in ((3, [1, 2, 3, 1]), (1, [1, 1, 1]), (2, [1, 2, 1, 2])):
        engine = make_engine(max_depth=most)
        with engine.hooks():
            function()
        assert [remat.formula.depth for remat in engine.remats][: len(found)] == found
        assert max(remat.formula.depth for remat in engine.remats) == most


def test_the_length_of_an_unsaved_chain(make_engine: Callable[..., Engine]) -> None:
    for most, found in ((2, []), (3, ["neg>neg>neg"])):
        engine = make_engine(max_depth=most)
        with engine.hooks():
            saver(held(make_leaf(400)).neg().neg().neg())
        assert engine.found == found


def test_the_passes_of_a_chain(make_engine: Callable[..., Engine]) -> None:
    for most, found in ((5, []), (6, ["neg>neg>neg"])):
        engine = make_engine(max_passes=most)
        with engine.hooks():
            saver(held(make_leaf(400)).neg().neg().neg())
        assert engine.found == found


# -------------------------------------------------------------------- lifetime


class Witness(torch.autograd.Function):
    """Lives as long as the graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owned: object) -> torch.Tensor:
        ctx.owned = owned
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def test_a_record_keeps_no_graph(engine: Engine) -> None:
    class Owned:
        pass

    owned = Owned()
    gone = weakref.ref(owned)
    with engine.hooks():
        h = Witness.apply(make_leaf(1000), owned)
        y = functional.gelu(h)
        loss = saver(torch.relu(y) * 2.0)
    remats = engine.remats
    assert len(remats) == 2
    engine.forget()
    gc.disable()
    try:
        del h, y, loss, owned
        assert gone() is None  # without the collector: there is no cycle
    finally:
        gc.enable()


def test_a_result_is_freed_while_its_record_lives(engine: Engine) -> None:
    with engine.hooks():
        y = functional.gelu(held(make_leaf(1000)))
        loss = saver(y)
    storage = weakref.ref(y.untyped_storage())
    (remat,) = engine.remats
    tensor = weakref.ref(y)
    engine.forget()
    del y
    assert tensor() is None
    assert storage() is None
    assert remat.formula.nbytes == 4000
    del loss
