"""Arguments that are read off their copies: gathers, repetitions, nearest upsampling."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from cswap.remat.copies import LEAST_REPEATED
from cswap.remat.record import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remat.conftest import Engine

    Function = Callable[[torch.Tensor], torch.Tensor]


def gradient(f: Function, x: torch.Tensor) -> torch.Tensor:
    """Of a result that backward needs as it is: it is multiplied with itself."""
    y = f(x)
    return torch.autograd.grad((y * y).sum(), x)[0]


def check(engine: Engine, f: Function, x: torch.Tensor, found: list[str]) -> None:
    wanted = gradient(f, x)
    with engine.hooks():
        assert same_bits(gradient(f, x), wanted)
    assert engine.found == found


def index(n_rows: int, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(n_rows, (n,), dtype=dtype)


def special(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers, NaN with a payload, infinities and zeros of both signs."""
    x = torch.randn(sizes).to(dtype)
    flat = x.view(-1)
    values = torch.tensor([float("nan"), float("inf"), -0.0, 0.0], dtype=dtype)
    flat[: len(values)] = values[: flat.numel()]
    return x.requires_grad_()


def gather(dim: int, i: torch.Tensor) -> Function:
    return lambda x: x.index_select(dim, i)


def repetition(times: list[int]) -> Function:
    return lambda x: x.repeat(*times)


def look_up(i: torch.Tensor, **options: Any) -> Function:
    return lambda x: functional.embedding(i, x, **options)


def bag(i: torch.Tensor, offsets: torch.Tensor | None = None, **options: Any) -> Function:
    options = {"mode": "sum", **options}
    return lambda x: functional.embedding_bag(i, x, offsets, **options)


CASES: dict[str, tuple[str, Callable[[], tuple[Function, torch.Tensor]]]] = {
    "rows": (
        "index_select",
        lambda: (gather(0, index(8, 40)), special(8, 3)),
    ),
    "some_rows": (
        "index_select",
        lambda: (gather(0, index(3, 40)), special(8, 3)),
    ),
    "columns": (
        "index_select",
        lambda: (gather(-1, index(5, 11, torch.int32)), special(4, 5)),
    ),
    "embedding": ("embedding", lambda: (look_up(index(8, 40).view(4, 10)), special(8, 3))),
    "embedding_padded": (
        "embedding",
        lambda: (look_up(index(8, 40), padding_idx=2), special(8, 3)),
    ),
    "bag": ("embedding_bag", lambda: (bag(index(8, 40).view(40, 1)), special(8, 3))),
    "bag_mean": (
        "embedding_bag",
        lambda: (bag(index(8, 40), torch.arange(40), mode="mean"), special(8, 3)),
    ),
    "bag_padded": (
        "embedding_bag",
        lambda: (bag(index(8, 40), torch.arange(40), padding_idx=3), special(8, 3)),
    ),
    "bag_to_the_last": (
        "embedding_bag",
        lambda: (
            bag(index(8, 40), torch.arange(41), include_last_offset=True),
            special(8, 3),
        ),
    ),
    "repeat": ("repeat", lambda: (lambda x: x.repeat(1, 3), special(4, 5))),
    "repeat_more": ("repeat", lambda: (lambda x: x.repeat(2, 1, 3), special(4, 5))),
    "upsample": (
        "upsample",
        lambda: (
            lambda x: functional.interpolate(x, scale_factor=(2.0, 3.0)),
            special(2, 3, 4, 5),
        ),
    ),
    "upsample_to": (
        "upsample",
        lambda: (lambda x: functional.interpolate(x, size=(8, 10)), special(2, 3, 4, 5)),
    ),
    "upsample_channels_last": (
        "upsample",
        lambda: (
            lambda x: functional.interpolate(
                x.contiguous(memory_format=torch.channels_last), scale_factor=2
            ),
            special(2, 3, 4, 5),
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_row_gives_the_result_again(case, dtype, engine):
    name, make = CASES[case]
    f, x = make()
    x = x.detach().to(dtype).requires_grad_()
    check(engine, f, x, [name])
    part = engine.remats[0].formula.held_bytes
    assert part == x.nbytes
    # And what the operator's node saves: an index, and of bags offsets and sizes.
    assert engine.held_bytes <= part + 5 * 41 * 8


def test_only_the_part_is_held(engine):
    x = torch.randn(8, 64, requires_grad=True)
    with engine.hooks():
        y = x.index_select(0, index(8, 800))
        loss = (y * y).sum()
    assert engine.held_bytes == x.nbytes + 800 * 8
    del y
    loss.backward()


def test_a_view_of_the_result_is_one_of_the_memory(engine):
    i = index(8, 40)
    check(
        engine, lambda x: x.index_select(0, i).view(40, 2, 4)[:, 1], special(8, 8), ["index_select"]
    )


def test_what_is_written_into_the_argument_does_not_matter(engine):
    x, i = torch.randn(8, 3, requires_grad=True), index(8, 40)
    wanted = gradient(lambda x: x.index_select(0, i), x)
    with engine.hooks():
        y = x.index_select(0, i)
        x.data.zero_()  # which autograd does not see: no operator has saved it
        found = torch.autograd.grad((y * y).sum(), x)[0]
    assert engine.found == ["index_select"]
    assert same_bits(found, wanted)


def test_a_result_that_was_written_into_is_stored(engine):
    i = index(8, 40)
    check(engine, lambda x: x.index_select(0, i).mul_(2), special(8, 3), [])


def test_a_result_that_was_written_into_without_a_history_is_stored(engine):
    x, i = torch.randn(8, 3, requires_grad=True), index(8, 40)
    with engine.hooks():
        y = x.index_select(0, i)
        with torch.no_grad():
            y[:20] = 0  # other copies of these rows stay as they were
        wanted = (2 * y.detach()).clone()
        loss = (y * y).sum()
        found = torch.autograd.grad(loss, x)[0]
    assert engine.found == []
    assert torch.allclose(found, torch.zeros(8, 3).index_add_(0, i, wanted))


def test_an_index_that_was_written_into_raises_as_without_hooks(engine):
    x, i = torch.randn(8, 3, requires_grad=True), index(8, 40)
    with engine.hooks():
        y = x.index_select(0, i)
        loss = (y * y).sum()
    assert engine.found == ["index_select"]
    i.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.index_select(0, index(8, 8 * LEAST_REPEATED - 1)),
        lambda x: x.repeat(1, 1),
        lambda x: functional.interpolate(x[None, None], size=(12, 7))[0, 0],
    ],
    ids=["as_many_rows", "once", "no_whole_factor"],
)
def test_a_part_that_is_not_much_smaller_or_not_regular_is_not_read_off(f, engine):
    torch.manual_seed(1)
    x = special(8, 3)
    wanted = gradient(f, x)
    torch.manual_seed(1)
    special(8, 3)
    with engine.hooks():
        found = gradient(f, x)
    assert engine.found == []
    assert found.shape == wanted.shape


def test_without_copies_nothing_is_read_off(make_engine):
    i = index(8, 40)
    check(make_engine(copies=False), lambda x: x.index_select(0, i), special(8, 3), [])


def test_random_gathers_and_repetitions(make_engine):
    chance, n_found = random.Random(0), 0
    for _ in range(150):
        sizes = [chance.randint(1, 6) for _ in range(chance.randint(1, 4))]
        dim = chance.randrange(len(sizes))
        x = special(*sizes)
        if chance.random() < 0.5:
            i = index(sizes[dim], chance.randint(1, 30))
            f, n = gather(dim, i), i.numel() * x.numel() // sizes[dim]
        else:
            times = [chance.randint(1, 4) for _ in range(len(sizes) + chance.randint(0, 2))]
            f, n = repetition(times), x.numel() * torch.Size(times).numel()
        engine, expected = make_engine(), x.numel() * LEAST_REPEATED <= n
        wanted = gradient(f, x)
        with engine.hooks():
            assert same_bits(gradient(f, x), wanted)
        assert bool(engine.found) == expected
        n_found += expected
    assert n_found > 50


@pytest.mark.parametrize(
    ("offsets", "n"),
    [(torch.arange(0, 80, 2), 80), (torch.arange(-1, 39).clamp(min=0), 40)],
    ids=["of_two", "one_empty"],
)
def test_a_bag_of_several_rows_is_stored(offsets, n, engine):
    check(engine, bag(index(8, n), offsets), special(8, 3), [])


def test_a_bag_with_weights_of_its_rows_is_stored(engine):
    weights = torch.rand(40, requires_grad=True)
    f = bag(index(8, 40), torch.arange(40), per_sample_weights=weights)
    check(engine, f, special(8, 3), [])


def tables(dim: int, n_tables: int, n_rows: int = 8, n: int = 40) -> tuple[Any, list[Any]]:
    """A stack of rows of tables, of a dense operand that is held, and of one that is not."""
    weights = [special(n_rows, 3) for _ in range(n_tables)]
    indices = [index(n_rows, n) for _ in range(n_tables)]
    dense, other = torch.randn(n, 3, requires_grad=True), torch.randn(n, 3, requires_grad=True)

    def f():
        rows = [functional.embedding_bag(i, w, torch.arange(n), mode="sum")
                for w, i in zip(weights[1:], indices[1:], strict=True)]  # fmt: skip
        first = functional.embedding(indices[0], weights[0])
        together = torch.stack([dense.tanh(), first, *rows, other.tanh() + other.detach()], dim)
        return (together * together.detach()).sum() + (together * together).sum()

    return f, [*weights, dense, other]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_stack_of_rows_is_one_gather(dim, engine):
    f, leaves = tables(dim, 5)
    wanted = torch.autograd.grad(f(), leaves)
    with engine.hooks():
        found = torch.autograd.grad(f(), leaves)
    assert all(map(same_bits, found, wanted))
    assert "stack" in engine.found
    remat = next(r for r in engine.remats if r.formula.operator == "stack")
    assert remat.formula.held_bytes == 5 * 8 * 3 * 4 + 40 * 3 * 4  # tables, and what nobody holds
    assert [part.read is None for part in remat.formula.parts] == 5 * [False] + [True]


@pytest.mark.parametrize(("dim", "n_tables", "n"), [(2, 5, 40), (1, 1, 40), (1, 5, 15)])
def test_a_stack_whose_parts_are_not_much_smaller_is_stored(dim, n_tables, n, engine):
    f, leaves = tables(dim, n_tables, n=n)
    wanted = torch.autograd.grad(f(), leaves)
    with engine.hooks():
        found = torch.autograd.grad(f(), leaves)
    assert all(map(same_bits, found, wanted))
    assert "stack" not in engine.found


def test_a_stack_of_another_number_of_operands_is_not_recognised(engine):
    finder = engine.finder
    w, i = torch.randn(8, 3, requires_grad=True), index(8, 40)
    three = torch.stack([functional.embedding(i, w) for _ in range(3)])
    with torch.autograd.graph.saved_tensors_hooks(engine.pack, lambda p: p.unpack()):
        three = torch.stack([functional.embedding(i, w) for _ in range(3)])
        four = torch.stack([functional.embedding(i, w) for _ in range(4)])
    known = finder.find(three)
    assert known is not None
    assert finder.recognised(three, known.formula) is not None
    assert finder.recognised(four, known.formula) is None


def test_random_stacks(make_engine):
    chance, n_found = random.Random(1), 0
    for _ in range(40):
        f, leaves = tables(
            chance.randrange(2), chance.randint(1, 6), chance.randint(1, 8), chance.randint(2, 60)
        )
        wanted = torch.autograd.grad(f(), leaves)
        engine = make_engine()
        with engine.hooks():
            found = torch.autograd.grad(f(), leaves)
        assert all(map(same_bits, found, wanted))
        n_found += "stack" in engine.found
    assert n_found > 15
