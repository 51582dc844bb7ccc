"""Ways in which a tensor that is computed again could be another one."""

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


# ------------------------------------------------------------------ the result


def test_an_address_that_is_used_again(engine: Engine) -> None:
    h = held(make_leaf(100))
    with engine.hooks():
        y = functional.gelu(h)
        address = y.data_ptr()
        del y
        others = [torch.sinh(h) for _ in range(100)]
        same = [other for other in others if other.data_ptr() == address]
        for other in same:
            saver(other)
    assert same
    assert engine.found == []


def test_a_result_that_was_written_into_behind_autograd(engine: Engine) -> None:
    with engine.hooks():
        y = functional.gelu(held(make_leaf(40)))
        with torch.no_grad():
            y.mul_(2)
        saver(y)
    assert engine.found == []


def test_a_view_of_a_result_that_was_written_into(engine: Engine) -> None:
    with engine.hooks():
        y = functional.gelu(held(make_leaf(4, 10)))
        with torch.no_grad():
            y[1:].zero_()
        saver(y.t())
        z = functional.gelu(held(make_leaf(4, 10)))
        z[1:] = 0  # autograd's node is CopySlices from here on
        saver(z)
        saver(z[0])
    assert engine.found == []


def test_an_operator_in_place_counts_once(engine: Engine, storing: Engine) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = functional.layer_norm(held(x), (10,))
        return saver(functional.relu(y, inplace=True)).sum()

    x = make_leaf(4, 10)
    grads = []
    for one in (engine, storing):
        with one.hooks():
            loss = function(x)
        grads += torch.autograd.grad(loss, x)
    assert engine.found == ["layer_norm>relu"]
    assert engine.remats[0].unseen == 0
    assert same_bits(*grads)


def test_residual_sums_in_place(engine: Engine, storing: Engine) -> None:
    conv, weight, bias = nn.Conv2d(4, 4, 1), make_leaf(4), make_leaf(4)

    def function(x: torch.Tensor) -> torch.Tensor:
        shortcut = functional.relu(x)
        y = functional.batch_norm(conv(shortcut), None, None, weight, bias, training=True)
        y += shortcut
        return conv(functional.relu_(y)).sum()

    x = make_leaf(2, 4, 6, 6)
    grads = []
    for one in (engine, storing):
        one.least_numel = 200
        with one.hooks():
            loss = function(x * 1)
        grads.append(torch.autograd.grad(loss, (x, weight, bias, *conv.parameters())))
    assert engine.found == ["batch_norm>add>relu"]
    assert all(map(same_bits, *grads))


def test_a_result_that_changed_after_its_own_node_saved_it(engine: Engine) -> None:
    with engine.hooks():
        y = functional.relu_(functional.layer_norm(held(make_leaf(4, 10)), (10,)))
        assert engine.found == ["layer_norm>relu"]
        with torch.no_grad():
            y.mul_(2)
        saver(y)
    assert engine.saved[-1] == "-"


def test_a_result_whose_graph_is_gone(engine: Engine) -> None:
    with engine.hooks():
        y = functional.relu_(functional.layer_norm(held(make_leaf(4, 10)), (10,)))
        z = functional.layer_norm(held(make_leaf(4, 10)), (10,), make_leaf(10))
        (y.sum() + z.sum()).backward()
        with torch.no_grad():
            y.mul_(2)
        found = len(engine.found)
        saver(y)
        saver(z)
    assert len(engine.found) == found


def test_data_set_behind_autograd_is_found_by_comparing(engine: Engine) -> None:
    with engine.hooks():
        y = functional.gelu(held(make_leaf(40)))
        y.data = y.data * 2
        saver(y)
    (remat,) = engine.remats
    inputs = [packed.unpack() for packed in remat.inputs]  # type: ignore[attr-defined]
    assert not remat.agrees(y.detach(), inputs)
    assert remat.agrees(functional.gelu(inputs[0]), inputs)


def test_a_result_that_does_not_fill_its_storage(engine: Engine) -> None:
    with engine.hooks():
        out = torch.empty(100)
        with torch.no_grad():
            part = out[:40]
        y = functional.gelu(held(make_leaf(40)))
        y.data = part
        saver(y)
    assert engine.found == []


# ------------------------------------------------------------------ the inputs


def test_an_input_that_changed_after_it_was_saved(engine: Engine) -> None:
    h = make_leaf(40) * 1
    scale = torch.ones((), requires_grad=True)
    with engine.hooks():
        loss = (functional.gelu(h) * scale).sum()
    assert engine.found == ["gelu"]
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_input_that_changed_before_it_was_saved(engine: Engine, storing: Engine) -> None:
    x = make_leaf(40)
    grads = []
    for one in (engine, storing):
        with one.hooks():
            h = x * 1
            h.add_(1)
            with torch.no_grad():
                h.mul_(2)
            loss = saver(functional.gelu(h)).sum()
        grads += torch.autograd.grad(loss, x)
    assert engine.found == ["gelu"]
    assert same_bits(*grads)


def test_inputs_that_nobody_saved(engine: Engine) -> None:
    with engine.hooks():
        x = make_leaf(40) * 1
        saver(torch.relu(x))  # x is nobody's
        saver(held(x) + 1.0)  # the number is nobody's
        saver(held(x) + torch.randn(40))
        saver(1 - held(x))
        saver(torch.where(x > 0, held(x), 0.3))
        saver(held(x).masked_fill(x > 0, 0.3))
    assert engine.found == []


def test_numbers_keep_their_kind(engine: Engine, storing: Engine) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(40).to(dtype).requires_grad_()
        for number in (0.3, 3, True, torch.tensor(0.3), torch.tensor(0.3, dtype=torch.float64)):
            grads = []
            for one in (engine, storing):
                with one.hooks():
                    loss = saver(held(x) * number).sum()
                grads += torch.autograd.grad(loss, x)
            assert same_bits(*grads)
    assert engine.found == ["mul"] * 15


def test_objects_of_others(engine: Engine) -> None:
    with engine.hooks():
        with torch.autograd.graph.save_on_cpu():
            y = functional.gelu(make_leaf(40) * 1)
        saver(y)
        z = checkpoint(lambda x: functional.gelu(x * 2), make_leaf(40), use_reentrant=False)
        saver(z)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        u = functional.gelu(make_leaf(40) * 1)
    v = functional.gelu(make_leaf(40) * 1)
    with engine.hooks():
        saver(u)
        saver(v)
    assert engine.found == []


class GeluBackward0(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_operators_of_users(engine: Engine) -> None:
    function = type("Gelu", (GeluBackward0,), {})
    with engine.hooks():
        saver(function.apply(held(make_leaf(40))))
        saver(GeluBackward0.apply(held(make_leaf(40))))
    assert engine.found == []


def test_leaves_are_copied_if_they_are_small(engine: Engine) -> None:
    small, large = make_leaf(1, 10), make_leaf(1000, 10)
    with engine.hooks():
        x = held(make_leaf(1000, 10))
        saver(x + small)
        saver(x + large)
    (remat,) = engine.remats
    assert [type(c) for c in remat.constants] == [torch.Tensor]
    assert remat.constants[0] is not small
    assert engine.found == ["add"]


# ----------------------------------------------------------------------- views

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(8, -1),
    "transpose": lambda x: x.transpose(-1, -2),
    "negative": lambda x: x.mT,
    "permute": lambda x: x.permute(2, 0, 1),
    "slice": lambda x: x[:, 1:-1, ::2],
    "select": lambda x: x[:, -1],
    "unsqueeze": lambda x: x[:, None],
    "squeeze": lambda x: x[None].squeeze(0),
    "squeeze_some": lambda x: x[None, :, None].squeeze((0, 2)),
    "squeeze_all": lambda x: x[None, :, None].squeeze(),
    "split": lambda x: x.split(3, -1)[1],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split_sizes": lambda x: x.split([1, 5], 2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "expand": lambda x: x[:, None].expand(-1, 2, -1, -1),
    "t": lambda x: x.flatten(1).t(),
    "several": lambda x: x.unflatten(2, (2, 3)).movedim(3, 0)[1:].transpose(1, 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_between_operators(view: str, engine: Engine, storing: Engine) -> None:
    x = make_leaf(4, 4, 6)
    grads = []
    for one in (engine, storing):
        with one.hooks():
            loss = saver(torch.relu(VIEWS[view](functional.silu(held(x))))).sum()
        grads += torch.autograd.grad(loss, x)
    assert engine.found == ["silu>relu"]
    assert same_bits(*grads)


@pytest.mark.parametrize("view", VIEWS)
def test_saved_views(view: str, engine: Engine, storing: Engine) -> None:
    x = make_leaf(4, 4, 6)
    grads = []
    for one in (engine, storing):
        with one.hooks():
            loss = saver(VIEWS[view](functional.silu(held(x)))).sum()
        grads += torch.autograd.grad(loss, x)
    assert engine.found == ["silu"]
    assert same_bits(*grads)


def test_parts_of_a_result(engine: Engine, storing: Engine) -> None:
    x = make_leaf(6, 8)
    grads = []
    for one in (engine, storing):
        with one.hooks():
            a, b = functional.gelu(held(x)).unsafe_chunk(2, 1)
            loss = (a * b).sum() + saver(torch.relu(a)).sum()
        grads += torch.autograd.grad(loss, x)
    assert engine.found == []  # a part of unsafe_chunk says that it is no view
    assert same_bits(*grads)


# ------------------------------------------------------------------- the state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + self.down(functional.silu(h) * torch.sigmoid(h))


def step(
    one: Engine, net: nn.Module, x: torch.Tensor, backward: Callable[[torch.Tensor], None]
) -> list[torch.Tensor]:
    net.zero_grad()
    with one.hooks():
        loss = net(x).float().square().mean()
    backward(loss)
    return [p.grad for p in net.parameters() if p.grad is not None]


def plain_backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def check_steps(
    engine: Engine,
    storing: Engine,
    backward: Callable[[torch.Tensor], None] = plain_backward,
    net: nn.Module | None = None,
) -> None:
    net = net or Net()
    x = torch.randn(7, 11, 24)
    assert all(
        map(same_bits, step(engine, net, x, backward), step(storing, net, x, plain_backward))
    )


def test_autocast(engine: Engine, storing: Engine) -> None:
    def backward(loss: torch.Tensor) -> None:  # of which autocast must change nothing
        with torch.autocast("cpu", torch.float16):
            loss.backward()  # type: ignore[no-untyped-call]

    net = Net()
    x = torch.randn(7, 11, 24)
    grads = []
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
    assert engine.remats[0].unseen == 1


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
            loss.backward()  # type: ignore[no-untyped-call]

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
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        for p in net.parameters():
            p.grad = None
        loss.backward()  # type: ignore[no-untyped-call]

    net = Net()
    check_steps(engine, storing, backward, net)
    unpacked = [(p.remat.operator, p.unpacked) for p in engine.packed if hasattr(p, "remat")]
    # The product asks for SiLU's result, which its own node asks for, too.
    assert unpacked == [("layer_norm", 2), ("silu", 4), ("mul", 2)]


def test_double_backward(engine: Engine, storing: Engine) -> None:
    net, x = Net(), make_leaf(7, 11, 24)
    grads = []
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
    grads = []
    for one in (engine, storing):

        def inside(x: torch.Tensor, one: Engine = one) -> torch.Tensor:
            with one.hooks():
                return net(x)  # type: ignore[no-any-return]

        loss = checkpoint(inside, x, use_reentrant=True).square().sum()
        x.grad = None
        loss.backward()
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
        assert [remat.depth for remat in engine.remats][: len(found)] == found
        assert max(remat.depth for remat in engine.remats) == most


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


def test_only_through_what_was_saved(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(through_unsaved=False)
    with engine.hooks():
        saver(-held(make_leaf(400)))
        saver(held(make_leaf(400)).neg().neg())
    assert engine.found == ["neg"]


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
    engine.packed.clear()
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
    engine.packed.clear()
    del y
    assert tensor() is None
    assert storage() is None
    assert remat.nbytes == 4000
    del loss
