"""The memory half of a chromosome: size classes, and the number of objects of each class.

Source: SwapAdvisor (ASPLOS 2020), section 5.3. TS: the sorted unique sizes of all tensors. CLS: the
class of each size; each entry equals its predecessor or is one more. An object of a class has the
class's largest size. CNT: number of objects per class. Classes are counted from 0 here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

SPREAD: Final = 0.2
"""Standard deviation of a mutated count, relative to its old value. The paper gives no value."""


class Pools(NamedTuple):
    """One allocation.

    Attributes:
        cls: [sizes] CLS.
        cnt: [classes] CNT.
    """

    cls: Ints
    cnt: Ints


def object_bytes(sizes: Ints, cls: Ints) -> Ints:
    """[classes] size of each class's objects: its largest tensor.

    >>> object_bytes(np.array([1, 2, 3, 4]), np.array([0, 1, 1, 1])).tolist()
    [1, 4]
    """
    last = np.flatnonzero(np.diff(cls, append=cls[-1] + 1))
    largest: Ints = sizes[last]
    return largest


def repaired_classes(cls: Ints) -> Ints:
    """CLS with the smallest changes that make each entry its predecessor's or one more.

    An entry below its predecessor is raised to it. An entry more than one above its predecessor is
    lowered to one above; such entries occur only where two parents meet or after a mutation.

    >>> repaired_classes(np.array([0, 1, 0, 0])).tolist()
    [0, 1, 1, 1]
    """
    out = cls.copy()
    out[0] = 0
    for i in range(1, len(out)):
        out[i] = min(max(out[i], out[i - 1]), out[i - 1] + 1)
    return out


def repaired_counts(sizes: Ints, pools: Pools, capacity: int, least: Ints) -> Pools:
    """Remove objects, equal bytes from each class, until all fit.

    Args:
        sizes: TS, bytes.
        pools: the allocation to be repaired; its classes are already right.
        capacity: bytes for all pools together.
        least: [classes] numbers of objects that a step needs; they stay even over the capacity.
    """
    each = object_bytes(sizes, pools.cls)
    cnt = np.maximum(pools.cnt, least)
    while (excess := int(cnt @ each) - capacity) > 0:
        free = (cnt > least) & (each > 0)  # tensors may have no bytes
        if not free.any():
            break
        share = -(-excess // int(free.sum()))
        cnt = np.where(free, np.maximum(cnt - -(-share // np.maximum(each, 1)), least), cnt)
    return Pools(pools.cls, cnt)


def crossed(one: Pools, other: Pools, point: int) -> Pools:
    """The child with the first ``point`` sizes of ``one`` and the rest of ``other``.

    Counts are extended to one per size, crossed likewise, and averaged within each class. The
    child's counts are not yet repaired.

    >>> child = crossed(
    ...     Pools(np.array([0, 1, 1, 1]), np.array([8, 1])),
    ...     Pools(np.array([0, 0, 0, 0]), np.array([4])), 2)
    >>> child.cls.tolist(), child.cnt.tolist()
    ([0, 1, 1, 1], [8, 3])
    """
    cls = repaired_classes(np.concatenate([one.cls[:point], other.cls[point:]]))
    extended = np.concatenate([one.cnt[one.cls][:point], other.cnt[other.cls][point:]])
    return Pools(cls, _averaged(extended, cls))


def mutated(pools: Pools, chance: float, rng: np.random.Generator) -> Pools:
    """Mutate an allocation: CLS entries move by one with all later ones; counts change at random.

    The result's counts are not yet repaired.
    """
    steps = np.diff(pools.cls, prepend=pools.cls[0])
    flip = rng.random(len(steps)) < chance
    flip[0] = False
    cls = np.cumsum(np.where(flip, 1 - steps, steps))
    extended = pools.cnt[pools.cls]
    cnt = _averaged(extended, cls)
    drawn = rng.random(len(cnt)) < chance
    noisy = rng.normal(cnt, np.maximum(SPREAD * cnt, 1.0))
    return Pools(cls, np.where(drawn, np.maximum(np.rint(noisy), 1), cnt).astype(np.int64))


def _averaged(extended: Ints, cls: Ints) -> Ints:
    total, count = np.bincount(cls, extended), np.bincount(cls)
    return np.asarray(total // count, np.int64)
