"""Ways in which a tensor that is computed again could be another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cswap
from cswap.remat.record import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

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
    same = 0
    with engine.hooks():
        for n in range(64, 8192, 64):  # of some size the allocator uses it again
            h = held(make_leaf(n))
            y = functional.gelu(h)
            address = y.data_ptr()
            del y
            other = torch.sinh(h)
            if other.data_ptr() == address:
                same += 1
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


def gradients(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *engines: Engine
) -> list[torch.Tensor]:
    """Of a leaf, by each engine. Args: function: gives the loss."""
    found: list[torch.Tensor] = []
    for one in engines:
        with one.hooks():
            loss = function(x)
        found += torch.autograd.grad(loss, x)
    return found


def test_an_operator_in_place_counts_once(engine: Engine, storing: Engine) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = functional.layer_norm(held(x), (10,))
        return saver(functional.relu(y, inplace=True)).sum()

    grads = gradients(function, make_leaf(4, 10), engine, storing)
    assert engine.found == ["layer_norm>relu"]
    assert same_bits(*grads)


CLONING = {
    "silu": functional.silu,
    "mish": functional.mish,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "hardtanh": functional.relu6,
}


@pytest.mark.parametrize("name", CLONING)
def test_an_operator_that_clones_what_it_overwrites(
    name: str, engine: Engine, storing: Engine
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = functional.layer_norm(held(x), (10,))
        return saver(CLONING[name](y, inplace=True)).sum()

    grads = gradients(function, make_leaf(4, 10), engine, storing)
    assert engine.found == ["layer_norm>clone", name]
    assert same_bits(*grads)


def test_a_result_that_was_written_into_is_not_taken_for_one_in_place(engine: Engine) -> None:
    with engine.hooks():
        for argument in (held(make_leaf(4, 10)), held(make_leaf(4, 10)).clone()):
            y = functional.silu(argument)
            with torch.no_grad():
                y.mul_(2)  # its version is 1, too
            saver(y)
        z = functional.silu(held(make_leaf(4, 10)).mul(2), inplace=True)
        with torch.no_grad():
            z.mul_(2)
        saver(z)
    assert "silu" not in engine.found


def test_a_cat_of_more_operands_is_another_one(engine: Engine, storing: Engine) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        losses = [
            saver(torch.cat([held(part) for part in x.split(sizes)])).sum()
            for sizes in ([3, 3], [2, 2, 2], [3, 1, 2])
        ]
        return torch.stack(losses).sum()

    # It tries the formulas of the other tensors, too.
    grads = gradients(function, make_leaf(6, 10), engine, storing)
    assert engine.found.count("cat") == 3
    assert same_bits(*grads)


def test_residual_sums_in_place(engine: Engine, storing: Engine) -> None:
    conv, weight, bias = nn.Conv2d(4, 4, 1), make_leaf(4), make_leaf(4)

    def function(x: torch.Tensor) -> torch.Tensor:
        shortcut = functional.relu(x)
        y = functional.batch_norm(conv(shortcut), None, None, weight, bias, training=True)
        y += shortcut
        return conv(functional.relu_(y)).sum()  # type: ignore[no-any-return]

    x = make_leaf(2, 4, 6, 6)
    grads: list[Any] = []
    for one in (engine, storing):
        one.least_numel = 200
        with one.hooks():
            loss = function(x * 1)
        grads.append(torch.autograd.grad(loss, (x, weight, bias, *conv.parameters())))
    assert engine.found == ["batch_norm>add>relu"]
    assert all(map(same_bits, *grads))


def test_an_intermediate_value_is_overwritten_where_nobody_else_uses_it(engine, storing):
    w = torch.randn(8, 8, requires_grad=True)

    def alone(x):
        return torch.relu(functional.layer_norm(x, (8,))) @ w

    def viewed(x):  # relu's operand is there as a view, too
        y = functional.layer_norm(x, (8,)).abs().neg()
        return (torch.relu(y) * y.view(4, 32).sin().view(16, 8)) @ w

    for function in (alone, viewed):
        x = torch.randn(16, 8, requires_grad=True)
        grads = []
        for one in (engine, storing):
            with one.hooks():
                loss = function(x).sum()
            grads.append(torch.autograd.grad(loss, (x, w)))
        assert all(map(same_bits, *grads))
    functions = {step.function for remat in engine.remats for step in remat.formula.steps}
    assert torch.relu_ in functions


class Calls(TorchDispatchMode):
    """Names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def wide(x: torch.Tensor) -> torch.Tensor:
    return functional.silu(held(x))


@pytest.mark.parametrize(
    ("function", "written"),
    [
        # A product saves its operands, but not if the other one needs no gradient.
        (lambda x, u: wide(x) * u.detach(), "aten.mul.out"),
        (lambda x, u: u.detach() * wide(x), "aten.mul.out"),
        (lambda x, u: wide(x) / u.detach(), "aten.div.out"),
        (lambda x, u: functional.relu(held(u)) + wide(x), "aten.add.out"),
        (lambda x, u: wide(x) + functional.relu(held(u)), "aten.add.out"),
        (lambda x, u: functional.relu(held(u)) - wide(x).abs(), "aten.sub.out"),
        (lambda x, _: wide(x) * 3, "aten.mul.out"),
        (lambda x, u: wide(x) * held(u), None),
        (lambda x, u: wide(x)[:1] + functional.relu(held(u)), None),  # the result is larger
        (lambda x, u: wide(x)[:1].contiguous() * u.detach(), None),
        (lambda x, u: wide(x) + functional.relu(held(u)).t(), None),  # other strides
        (lambda x, u: wide(x) * u.detach().double(), None),  # another dtype
        (lambda x, _: (y := wide(x).abs()) + y.t(), None),
    ],
)
def test_arithmetic_is_written_into_an_operand_that_was_computed(
    engine, storing, function, written
):
    w = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    x, u = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    grads: list[Any] = []
    for one in (engine, storing):
        with one.hooks():
            loss = saver(function(x, u)).double() @ w
        grads.append(torch.autograd.grad(loss.sum(), (x, w)))
    assert all(map(same_bits, *grads))
    calls = Calls()
    for remat in engine.remats:
        inputs = [packed.unpack() for packed in remat.inputs]
        with torch.no_grad(), calls:
            remat.run(inputs)
    assert engine.remats
    assert {name for name in calls.names if name.endswith(".out")} == ({written} - {None})


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
        row, like = (held(make_leaf(4, 10))[torch.tensor([2, 0])] for _ in range(2))
        saver(like)  # its formula is tried, too
        (y.sum() + z.sum() + row.sum()).backward()
        with torch.no_grad():
            y.mul_(2)
        found = len(engine.found)
        assert engine.found[-1] == "index"
        saver(y)
        saver(z)
        saver(row)
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
    grads: list[torch.Tensor] = []
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
            grads: list[torch.Tensor] = []
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
    function: Any = type("Gelu", (GeluBackward0,), {})
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


@pytest.mark.parametrize(("rows", "found"), [(64, ["add"]), (63, [])])
def test_a_leaf_is_copied_up_to_a_64th_of_the_tensor(
    rows: int, found: list[str], engine: Engine
) -> None:
    with engine.hooks():
        saver(held(make_leaf(rows, 10)) + make_leaf(1, 10))
    assert engine.found == found


class Special(torch.Tensor):
    pass


def test_a_leaf_whose_memory_was_freed_is_not_copied(engine: Engine) -> None:
    x = torch.randn(64, 8, 6, 6, requires_grad=True)
    weight, bias = (torch.randn(8, requires_grad=True) for _ in range(2))
    with engine.hooks():
        y = functional.batch_norm(x, None, None, weight, bias, training=True)
        bias.untyped_storage().resize_(0)  # as FSDP does after a module's forward
        functional.relu(y) * y
    assert engine.found == []


def test_a_leaf_of_a_subclass_is_not_copied(engine: Engine) -> None:
    leaf = torch.randn(1, 10).as_subclass(Special).requires_grad_()
    with engine.hooks():
        x = held(make_leaf(64, 10))
        with torch._C.DisableTorchFunctionSubclass():
            y = x + leaf
        saver(y)
    assert type(y) is torch.Tensor
    assert engine.found == []


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "one element": lambda: torch.tensor([2.0], dtype=torch.float64),
    "not a dtype of Python's numbers": lambda: torch.tensor(2.0),
    "a subclass": lambda: nn.Parameter(torch.tensor(2.0, dtype=torch.float64), requires_grad=False),
    "written to": lambda: torch.tensor(1.0, dtype=torch.float64).add_(1),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_tensor_that_no_hook_has_seen_is_no_number(kind: str, engine: Engine) -> None:
    with engine.hooks():
        x = held(make_leaf(40).double())
    y = x * OTHERS[kind]()
    with engine.hooks():
        saver(y)
    assert engine.found == []


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
    grads: list[torch.Tensor] = []
    for one in (engine, storing):
        with one.hooks():
            loss = saver(torch.relu(VIEWS[view](functional.silu(held(x))))).sum()
        grads += torch.autograd.grad(loss, x)
    assert engine.found == ["silu>relu"]
    assert same_bits(*grads)


@pytest.mark.parametrize("view", VIEWS)
def test_saved_views(view: str, engine: Engine, storing: Engine) -> None:
    x = make_leaf(4, 4, 6)
    grads: list[torch.Tensor] = []
    for one in (engine, storing):
        with one.hooks():
            loss = saver(VIEWS[view](functional.silu(held(x)))).sum()
        grads += torch.autograd.grad(loss, x)
    assert engine.found == ["silu"]
    assert same_bits(*grads)


def test_parts_of_a_result(engine: Engine, storing: Engine) -> None:
    x = make_leaf(6, 8)
    grads: list[torch.Tensor] = []
    for one in (engine, storing):
        with one.hooks():
            a, b = functional.gelu(held(x)).unsafe_chunk(2, 1)
            loss = (a * b).sum() + saver(torch.relu(a)).sum()
        grads += torch.autograd.grad(loss, x)
    assert engine.found == []  # a part of unsafe_chunk says that it is no view
    assert same_bits(*grads)


class AttrDict(dict[str, Any]):
    """Answers every question for an attribute with one for a key."""

    __getattr__ = dict.__getitem__


class Pretends(NamedTuple):
    """Of somebody else, with the attributes that ours have."""

    tensor: torch.Tensor
    depth: Any = 0
    tolerance: Any = 0


@pytest.mark.parametrize(
    "packed",
    [lambda x: AttrDict(tensor=x), Pretends, lambda x: Pretends(x, "deep", None)],
)
def test_objects_of_others_hooks_are_no_inputs(packed: Callable[[torch.Tensor], Any]) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        h = (x * 1.5).clone()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed(t.detach()), lambda p: p["tensor"] if isinstance(p, dict) else p.tensor
        ):
            y = functional.gelu(h)
        return torch.sin(y).sum()

    x = torch.randn(2048, 64, requires_grad=True)
    (wanted,) = torch.autograd.grad(loss(x), x)
    with cswap.swapping(min_bytes=1024) as engine:
        for _ in range(4):
            (found,) = torch.autograd.grad(loss(x), x)
            assert same_bits(found, wanted)
    assert engine.stats.fallbacks == 0
