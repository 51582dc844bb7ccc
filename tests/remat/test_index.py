"""Selections `x[i, :, j]` of random shapes and indices, computed again bit by bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from cswap.remat.record import same_bits
from tests.remat.test_values import held, saver

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remat.conftest import Engine

    Index = tuple[slice | torch.Tensor | None, ...]


def of_numbers(draw: random.Random, size: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(
        [draw.randrange(-size, size) for _ in range(torch.Size(shape).numel())]
    ).view(shape)


def random_case(seed: int) -> tuple[torch.Tensor, Index]:
    """A tensor and an index with at least one tensor in it."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 6) for _ in range(draw.randint(1, 4))]
    x = torch.randn(sizes)
    if draw.random() < 0.3:
        x = x.movedim(0, -1).contiguous().movedim(-1, 0)
    together = (draw.randint(1, 4),)
    index: list[slice | torch.Tensor | None] = []
    for size in sizes:
        kind = draw.choice(["all", "all", "part", "numbers", "row", "new", "mask"])
        if kind == "new":
            index.append(None)
        if kind in ("all", "new"):
            index.append(slice(None))
        elif kind == "part":
            index.append(slice(draw.randrange(size), None))
        elif kind == "mask" and together == (1,):
            mask = torch.zeros(size, dtype=torch.bool)
            mask[draw.randrange(size)] = True
            index.append(mask)
        else:
            shape = together if kind != "row" else (draw.choice([1, 3]), *together)
            index.append(of_numbers(draw, size, shape if shape[:-1] != (3,) else (3, *together)))
    if not any(isinstance(one, torch.Tensor) for one in index):
        index[-1] = of_numbers(draw, sizes[-1], (2, 2))
    return x, tuple(index)


@pytest.mark.parametrize("part", range(4))
def test_random_indices(part: int, make_engine: Callable[[], Engine], storing: Engine) -> None:
    for seed in range(part, 400, 4):
        x, index = random_case(seed)
        found = []
        for engine in (make_engine(), storing):
            leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            torch.manual_seed(seed)
            with engine.hooks():
                saver(held(leaf)[index]).square().sum().backward()
            found.append(leaf.grad)
            assert (engine is storing) or "index" in engine.found, (seed, x.shape, index)
        assert same_bits(*found), (seed, x.shape, index)  # type: ignore[arg-type] # of backward
