"""The order in which contenders take their turns."""

from __future__ import annotations

import random
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
