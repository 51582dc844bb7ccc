"""Contenders take turns, and their like steps are compared."""

from __future__ import annotations

import random
from statistics import median, quantiles
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


def turns(contenders: Sequence[T], round_: int) -> list[T]:
    """The contenders in the order of a round; the same rounds always give the same orders.

    Whoever comes after another finds its caches and its heap. In an order that is only rotated,
    that is always the same one. So each round has an order of its own, by chance.

    >>> sorted(turns("abc", 7))
    ['a', 'b', 'c']
    """
    order = list(contenders)
    random.Random(round_).shuffle(order)
    return order


def of_like_steps(
    mine_s: Sequence[float], its_s: Sequence[float]
) -> tuple[float, tuple[float, float] | None]:
    """Median and quartiles of the quotients of like steps; of a single step there are no quartiles.

    >>> of_like_steps([2.0, 3.0, 6.0], [1.0, 1.0, 1.0])
    (3.0, (2.0, 6.0))
    """
    quotients = [mine / its for mine, its in zip(mine_s, its_s, strict=True)]
    cuts = quantiles(quotients, n=4) if len(quotients) > 1 else None
    return median(quotients), (cuts[0], cuts[2]) if cuts else None
