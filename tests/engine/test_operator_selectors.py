"""Selectors of operators, ``op:softmax``: which tensors they mean, and that these stay."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from cswap.config import SwapConfig
from cswap.engine.recipe import Role
from cswap.engine.saved.module_stack import Scope
from cswap.engine.saved.operators import MOST_NAMES, OperatorRules, names_of
from cswap.errors import ConfigError
from tests.engine.engines import assert_empty

OPTIONS: dict[str, Any] = {"min_bytes": 0, "codec": "zvc", "remat": False}
STEPS = 5
"""By the fourth, slots take the tensors, and others rest."""


def leaf(*sizes):
    return torch.randn(*sizes, requires_grad=True)


# ------------------------------------------------------- which tensors are meant

X = leaf(8, 16)
INDEX = torch.arange(8)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = 2 * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


ATTENTION = nn.MultiheadAttention(16, 2)

SAVES: dict[str, tuple[Any, int, int]] = {
    # selector: what runs on a result, how many saves it means, and of how many
    "op:softmax": (lambda x: x.softmax(-1), 1, 1),
    "op:gelu": (lambda x: functional.gelu(x), 1, 1),
    "op:relu": (lambda x: x.relu_(), 1, 1),
    "op:matmul": (lambda x: x @ x.t(), 2, 2),
    "op:linear": (lambda x: functional.linear(x, x), 2, 2),
    "op:dropout": (lambda x: functional.dropout(x, 0.5), 1, 1),
    "op:layer_norm": (lambda x: functional.layer_norm(x, (16,)), 3, 3),
    "op:mul": (lambda x: x.exp() * 2 * x, 2, 3),
    "op:*softmax": (lambda x: functional.cross_entropy(x, INDEX), 1, 4),
    "op:cross_entropy": (lambda x: functional.cross_entropy(x, INDEX), 4, 4),
    "op:SoftmaxBackward0": (lambda x: x.softmax(-1), 1, 1),
    "op:doubled": (Doubled.apply, 1, 2),  # the result alone
    "op:exp": (lambda x: x.exp().pow(2), 1, 2),  # not the result, where that is saved again
}


@pytest.mark.parametrize("selector", SAVES)
def test_an_operator_means_what_it_saves_itself(selector):
    function, meant, saved = SAVES[selector]
    found: list[bool] = []

    def pack(tensor):
        packed = engine.pack(tensor)
        book = engine.packer.book
        place = book.begun.places[book.begun.next - 1]
        found.append(bool(place.recipe.stays))
        return packed

    with cswap.swapping(**{**OPTIONS, "codec": "raw"}, exclude=[selector]) as engine:
        x = X * 1
        with torch.autograd.graph.saved_tensors_hooks(pack, engine.unpack):
            function(x)
    assert (sum(found), len(found)) == (meant, saved)


def test_inside_of_a_function_of_torch_a_result_is_known_by_its_node():
    with cswap.swapping(**OPTIONS, exclude=["op:softmax"]) as engine:
        ATTENTION(X, X, X)[0].sum().backward()
    assert engine.stats.kept_bytes_by_reason["excluded"] == 2 * 8 * 8 * 4  # heads, queries, keys


def test_the_two_names_of_an_operator():
    assert names_of(Role("relu_", "ConvolutionBackward0")) == ("relu",)
    assert names_of(Role("relu_", "ReluBackward0", is_result=True)) == ("relu", "relu")
    assert names_of(Role("", "MulBackward0")) == ()
    assert names_of(Role("a", "SafeSoftmaxBackward0", is_result=True)) == ("a", "safe_softmax")


# ------------------------------------------------------------- the three options


def attention(sizes):
    """Each memory has another size: products' inputs (16 n, 16 n, n^2 shared), gelu's (16 n)."""
    n = sizes

    def run():
        q, k = leaf(n, 16) * 1, leaf(n, 16) * 1
        p = (q @ k.t()).softmax(-1)
        return functional.gelu(p @ (k * 2)).sum()

    return run


def counts(engine, run, steps=STEPS):
    """Of each step: how many tensors have left, stay by a selector, and share memory."""
    found: list[tuple[int, ...]] = []
    before = (0, 0, 0)
    for _ in range(steps):
        loss = run()
        loss.backward()
        stats = engine.stats
        now = (stats.swapped, stats.kept_by_reason.get("excluded", 0), stats.deduplicated)
        found.append(tuple(b - a for a, b in zip(before, now, strict=True)))
        before = now
        del loss
    assert_empty(engine)
    return found


N_CASES: list[tuple[dict[str, Any], list[tuple[int, int, int]]]] = [
    # q, k, the softmax's result (saved again by the product), 2 k, and gelu's input
    ({}, [(5, 0, 1)] * STEPS),
    ({"exclude": "op:softmax"}, [(4, 1, 1)] * STEPS),
    # in the first step, the softmax's result has left when the product saves it, and is held twice
    ({"exclude": "op:matmul"}, [(2, 4, 1), *[(1, 4, 1)] * (STEPS - 1)]),
    ({"exclude": ["op:matmul", "op:softmax"]}, [(1, 4, 1)] * STEPS),
    ({"exclude": "op:gelu"}, [(4, 1, 1)] * STEPS),
    ({"exclude": "op:*"}, [(0, 5, 1)] * STEPS),
    ({"include": "op:gelu"}, [(1, 4, 1)] * STEPS),
    ({"include": "op:softmax"}, [(1, 4, 1)] * STEPS),
    # which softmax leaves in place until the product saves it
    ({"include": "op:matmul"}, [(4, 1, 1)] * STEPS),
    ({"include": "op:*m*", "exclude": "op:soft*"}, [(3, 2, 1)] * STEPS),
]


@pytest.mark.parametrize(("options", "expected"), N_CASES)
def test_tensors_stay_in_every_step(options, expected):
    with cswap.swapping(**OPTIONS, **options) as engine:
        assert counts(engine, attention(32)) == expected


@pytest.mark.parametrize("options", [options for options, _ in N_CASES])
def test_gradients_are_equal(options):
    def gradients(context):
        torch.manual_seed(0)
        q, k = leaf(32, 16), leaf(32, 16)
        found: list[torch.Tensor] = []
        with context:
            for _ in range(STEPS):
                p = (q.tanh() @ k.t()).softmax(-1)
                loss = functional.gelu(p @ k.relu() + p.t()[:, :16]).square().sum()
                found += torch.autograd.grad(loss, (q, k))
        return found

    expected = gradients(nullcontext())
    swapping = cswap.swapping(**{**OPTIONS, **options, "remat": True})
    assert all(map(torch.equal, gradients(swapping), expected))


def test_a_view_of_memory_that_stays_stays():
    def run():
        p = leaf(16, 16).softmax(-1)
        return (p.t()[4:8] @ p).sum()  # saves a part of p, and p

    with cswap.swapping(**OPTIONS, exclude="op:softmax") as engine:
        assert counts(engine, run) == [(0, 1, 2)] * STEPS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"exclude": "op:softmax"}, {"excluded": 1, "budget": 1}),
        ({"include": "op:tanh"}, {"excluded": 1, "budget": 1}),
        ({"include": ["op:tanh", "op:mul"]}, {"budget": 1}),  # which saves softmax's result again
    ],
)
def test_what_stays_by_a_selector_takes_nothing_of_the_budget(options, expected):
    with cswap.swapping(**OPTIONS, **options, budget=32 * 32 * 4) as engine:
        for _ in range(STEPS):
            before = engine.stats
            x = leaf(32, 32) * 1
            y, z = x.tanh(), x.softmax(-1)
            (y + z * z).sum().backward()
    stats = engine.stats
    kept = {why: n - before.kept_by_reason.get(why, 0) for why, n in stats.kept_by_reason.items()}
    assert {why: n for why, n in kept.items() if n} == expected
    assert stats.swapped - before.swapped == 2 - sum(expected.values())


def test_the_first_of_two_operators_says_which_codec():
    def codecs(**codec):
        named = {key.replace("_", ":", 1): name for key, name in codec.items()}
        with cswap.swapping(**{**OPTIONS, "codec": named}) as engine:
            x = leaf(32, 32).relu()
            (x @ x).sum().backward()
        (found,) = [e.codec for e in engine.explain()]
        return found

    assert codecs(op_relu="raw", op_matmul="zvc") == "raw"
    assert codecs(op_relu="zvc", op_matmul="raw") == "zvc"
    assert codecs(op_matmul="zvc", float32="raw") == "raw"
    assert codecs(float32="zvc", op_relu="raw") == "raw"
    assert codecs(**{"op_re*": "raw", "op_relu": "zvc"}) == "raw"
    assert codecs(**{"op_relu": "zvc", "op_re*": "raw"}) == "zvc"
    assert codecs(op_relu_="raw", op_ReluBackward0="zvc") == "raw"


def test_the_first_key_counts_whichever_of_its_names_an_operator_has():
    def codec(**named):
        rules = OperatorRules(SwapConfig(codec={f"op:{k}": v for k, v in named.items()}))
        role = Role("attention", "SoftmaxBackward0", is_result=True)
        return rules.of(role, Scope(codec="expk"))[0]

    assert codec(softmax="raw", attention="zvc") == "raw"
    assert codec(attention="zvc", softmax="raw") == "zvc"
    assert codec(other="raw") == "expk"


# ------------------------------------------------------------ beside modules


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.act, self.narrow = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)

    def forward(self, x):
        return self.narrow(self.act(self.wide(x))).softmax(-1)


BOTH: list[tuple[dict[str, Any], tuple[int, int]]] = [
    # of the block: the three modules' inputs, and the result
    ({"include": ["op:softmax"]}, (1, 3)),
    ({"include": ["wide", "op:softmax"]}, (2, 2)),
    ({"include": ["wide", "op:softmax"], "exclude": nn.Linear}, (1, 3)),
    ({"include": ["op:linear"], "exclude": "narrow"}, (1, 3)),
    ({"include": ["op:linear", nn.GELU], "exclude": "op:gelu"}, (2, 2)),
    ({"exclude": ["act", "op:softmax"]}, (2, 2)),
]


@pytest.mark.parametrize(("options", "expected"), BOTH)
def test_operators_and_modules_together(options, expected):
    model = Block()
    with cswap.install(model, **OPTIONS, **options) as handle:
        for n in range(1, STEPS + 1):
            model(leaf(32, 16) * 1).sum().backward()
            stats = handle.stats
            assert (stats.swapped, stats.kept_by_reason["excluded"]) == (
                n * expected[0],
                n * expected[1],
            )


def test_a_codec_of_an_operator_comes_before_that_of_its_module():
    model = Block()
    codec = {"float32": "expk", "act": "raw", "narrow": "raw", "op:gelu": "zvc"}
    with cswap.install(model, **{**OPTIONS, "codec": codec}) as handle:
        model(leaf(32, 16) * 1).sum().backward()
    found = {e.site.scope: (e.codec, e.reason) for e in handle.engine.explain()}
    forced = "forced for this module or operator"
    assert found["act"] == ("zvc", forced)
    assert found["narrow"] == ("raw", forced)
    assert found["wide"] == ("expk", "forced for this dtype")


# ------------------------------------------------------ another one at its place


class Branches(nn.Module):
    """Three operators that save equal tensors at the same place."""

    operator: Any = None

    def forward(self, x):
        return self.operator(x * 1).sum()


OPERATORS: dict[str, Any] = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
}


def each(order, **options):
    """Of each step, by the name of its operator: whether the tensor stays."""
    model, found = Branches(), []
    with cswap.install(model, **{**OPTIONS, **options}) as handle:
        before = 0
        for name in order:
            model.operator = OPERATORS[name]
            x = leaf(64, 64)
            model(x).backward()
            expected = leaf(64, 64)
            expected.data.copy_(x.data)
            OPERATORS[name](expected * 1).sum().backward()
            assert torch.equal(x.grad, expected.grad)
            now = handle.stats.kept_by_reason.get("excluded", 0)
            found.append((name, now > before))
            before = now
        return found, handle.stats


ORDERS = [
    [*["gelu"] * STEPS, "silu", "gelu", "silu", "silu", "silu", "silu", "gelu"],
    [*["tanh"] * STEPS, "softmax", "tanh", *["softmax"] * STEPS, "tanh"],
]


@pytest.mark.parametrize("codec", ["raw", "zvc"])
@pytest.mark.parametrize("order", ORDERS)
def test_exclude_holds_where_a_slot_had_another_operators_tensor(order, codec):
    found, _ = each(order, exclude=["op:silu", "op:softmax"], codec=codec)
    stays = {"silu", "softmax"}
    assert [name for name, kept in found if name in stays and not kept] == []
    assert not any(kept for _, kept in found[:STEPS])


@pytest.mark.usefixtures("_chains_take_no_time", "by_price")
def test_exclude_holds_where_another_operators_tensor_was_computed_again(taken):
    h, w = leaf(512, 64), leaf(64, 64)
    expected = torch.autograd.grad((functional.gelu(h) @ w).sum(), (h, w))
    again, before = [], 0
    with cswap.swapping(min_bytes=0, exclude="op:mm") as engine:
        for n in range(8):
            y = functional.gelu(h)
            loss = (y.mm(w) if n == 5 else y @ w).sum()
            del y
            assert all(map(torch.equal, torch.autograd.grad(loss, (h, w)), expected))
            now = engine.stats.by_codec["remat"].count
            again.append(now - before)
            before = now
    assert again[:6] == [1, 1, 1, 1, 1, 0]
    assert taken[:4] == [True] * 4
    assert engine.stats.kept_by_reason["excluded"] >= 1


def test_a_codec_does_not_go_over_to_another_operator():
    order = ORDERS[0][: STEPS + 2]
    _, stats = each(order, codec={"op:gelu": "raw", "op:silu": "zvc"})
    assert {name: one.count for name, one in stats.by_codec.items()} == {"raw": 6, "zvc": 1}


def test_lossy_for_one_operator_leaves_the_others_exact():
    def gradients(context):
        torch.manual_seed(0)
        found = []
        with context:
            for n in range(8):
                x = leaf(64, 64)
                (functional.silu if n == 6 else functional.gelu)(x * 1).sum().backward()
                found.append(x.grad)
        return found

    lossy = cswap.swapping(**{**OPTIONS, "codec": {"op:gelu": "int8", "op:silu": "zvc"}})
    pairs = zip(gradients(lossy), gradients(nullcontext()), strict=True)
    assert [torch.equal(a, b) for a, b in pairs] == [*[False] * 6, True, False]


def test_a_goal_keeps_excluded_tensors():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    plain = nn.Sequential(*(Block() for _ in range(3)))
    plain.load_state_dict(model.state_dict())
    options = {**OPTIONS, "codec": "auto", "remat": True, "fit": "min"}
    with cswap.install(model, **options, exclude=["op:softmax", "op:gelu"]) as handle:
        for n in range(1, 16):
            x = torch.randn(64, 16)
            for net in (model, plain):
                net.zero_grad()
                net(x).square().sum().backward()
            gradients = [[p.grad for p in net.parameters()] for net in (model, plain)]
            assert all(map(torch.equal, *gradients))
            kept = handle.stats.kept_by_reason
            # a goal may find that it would have kept them anyway
            assert kept["excluded"] + kept.get("goal", 0) >= 6 * n


# ----------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recompute": "op:gelu"}, "recompute='op:gelu': names an operator; whole modules"),
        ({"recompute": [nn.ReLU, "op:gelu"]}, "remat=True"),
        ({"exclude": "op:"}, 'exclude="op:": names no operator'),
        ({"include": ["op:gelu", "op:"]}, 'include="op:"'),
        ({"codec": {"op:": "zvc"}}, 'codec="op:"'),
        ({"codec": {"op:gelu": "zcv"}}, "zcv"),
        ({"exclude": "op:" + "*" * 600}, "exclude="),
    ],
)
def test_what_cannot_be_selected_is_refused(options, says):
    with pytest.raises(ConfigError) as error:
        cswap.install(nn.ReLU(), **options)
    assert says in str(error.value)


def two_steps(**options):
    with cswap.swapping(**{**OPTIONS, **options}):
        for _ in range(2):
            attention(32)().backward()


def test_a_name_that_matches_nothing_is_said_after_the_first_step(caplog):
    options: dict[str, Any] = {"exclude": ["op:sofmax", "op:gelu"], "include": ["op:lin*"]}
    with cswap.swapping(**OPTIONS, **options) as engine:
        loss = attention(32)()
        assert caplog.messages == []
        loss.backward()
        assert len(caplog.messages) == 2
        attention(32)().backward()
    del engine
    known = "Operators that have: gelu, matmul, softmax."
    first = "has saved a tensor of min_bytes or more in the first step."
    assert caplog.messages == [
        f"exclude='op:sofmax': no such operator {first} Did you mean 'op:softmax'? {known}",
        f"include='op:lin*': no such operator {first} {known}",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_names_that_match_are_not_spoken_of(caplog):
    two_steps(exclude="op:softmax,op:GeluBackward0", codec={"op:matmul": "zvc", "float32": "raw"})
    two_steps(codec={"op:*m*": "raw", "op:softmax": "zvc"})  # of two that match, one decides
    cswap.install(nn.ReLU(), exclude="op:relu", codec={"op:x": "zvc"}).remove()
    assert caplog.messages == []


def test_modules_without_a_model_are_still_spoken_of(caplog):
    cswap.install(exclude=["head", "op:gelu"]).remove()
    assert caplog.messages == ["exclude has no effect without a model: call install(model, ...)."]


def test_names_come_from_the_program_and_are_bounded():
    rules = OperatorRules(SwapConfig(exclude="op:x"))
    for n in range(2 * MOST_NAMES):
        rules.of(Role(f"f{n}\x1b"), Scope())
    assert rules._seen is not None
    assert len(rules._seen) == MOST_NAMES


def test_without_selectors_no_operator_is_recorded():
    assert not cswap.swapping(**OPTIONS)._engine.wants_operators
    assert not cswap.swapping(**OPTIONS, exclude="x")._engine.wants_operators
    engine = cswap.swapping(**OPTIONS, exclude="op:x")._engine
    assert engine.wants_operators
