"""Tensors of like blocks, about which a program decides together: `alike`.

Note [like blocks are decided together]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A large model is a row of blocks that save the same tensors, and its best plan treats many blocks
alike. HiGHS does not know that, and takes long to find it out. So in a large program the like
tensors of some blocks in a row have one variable, and their bytes and times are added up. Blocks
are taken by turns, every second one together: one that computes its argument again needs that of
the block before, so the best plans let the one stay and the other leave.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.fit.saved import Saved

TURNS: Final = 2
"""Blocks in a row that are of different groups."""

_NUMBER: Final = re.compile(r"\d+")


def alike(saved: Iterable[tuple[Saved, tuple[str, ...]]], n_blocks: int) -> list[int]:
    """The group of each tensor: groups have numbers.

    Args:
        saved: the tensors of a step in their order, and the actions that each may have.
        n_blocks: in a group, at most. Tensors of two blocks are alike if the paths of their modules
            differ in numbers alone, and they have the same bytes, place and actions.
    """
    seen: Counter[object] = Counter()
    groups: dict[object, int] = {}
    found = []
    for one, actions in saved:
        name = one.names[0]
        scope = _NUMBER.sub("", name.scope)
        like = scope, name.dtype, name.nth, one.nbytes, one.part_of, actions
        nth = seen[like]
        seen[like] += 1
        group = like, nth // (TURNS * n_blocks), nth % TURNS
        found.append(groups.setdefault(group, len(groups)))
    return found
