"""Values that an operator further up has saved: `find_holder`.

Note [the older summand is held by the other branch]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A residual sum saves nothing. But its older summand is the argument of the first operator of the
other branch, a norm or a convolution, which has saved it. That operator lies upstream of the sum:
the backward that asks for the sum runs through it, later. So its slot is as good as a slot of the
sum itself: plain torch needs that value, too, and a write into it is an error for both. A slot of
an operator that is not upstream is none: its backward need not run, and the program may write into
the value or free it.

The value is the same if both edges lead to the same output of the same node, since autograd gives
a tensor that was written into another node.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

MOST_NODES: Final = 160
"""Nodes that are visited: attention with rotary embeddings has about 80."""

HOLDERS: Final[dict[str, tuple[tuple[str, int], ...]]] = {
    "NativeLayerNormBackward0": (("input", 0),),
    "FusedRmsNormBackward0": (("input", 0),),
    "NativeBatchNormBackward0": (("input", 0),),
    "CudnnBatchNormBackward0": (("input", 0),),
    "NativeGroupNormBackward0": (("input", 0),),
    "ConvolutionBackward0": (("input", 0),),
    "AddmmBackward0": (("mat1", 1),),
    "MmBackward0": (("self", 0),),
    "PowBackward0": (("self", 0),),
    "MulBackward0": (("self", 0), ("other", 1)),
    "GeluBackward0": (("self", 0),),
    "SiluBackward0": (("self", 0),),
}
"""First operators of branches: slots that hold an argument as it was given, and their edges."""


class Holder(NamedTuple):
    """A slot that holds a value.

    Attributes:
        path: edges to its node, one after the other.
        edge: of that node, that leads to the value.
        slot: its name.
    """

    path: tuple[int, ...]
    edge: int
    slot: str


def find_holder(node: Any, edge: int) -> Holder | None:
    """A slot, upstream of a node, that holds the value at one of its edges.

    Args:
        node: of an operator with several arguments.
        edge: that leads to the value.

    Returns:
        The first one found; None: there is none, or the way is long.
    """
    wanted = node.next_functions[edge]
    oldest = wanted[0]._sequence_nr()  # noqa: SLF001 - no user of the value is older
    visited: dict[Any, None] = {}
    found: deque[tuple[tuple[int, ...], Any]] = deque(
        ((n,), e[0]) for n, e in enumerate(node.next_functions) if n != edge
    )
    while found and len(visited) < MOST_NODES:
        path, at = found.popleft()
        if at is None or at in visited or at._sequence_nr() < oldest:  # noqa: SLF001
            continue
        visited[at] = None
        edges = at.next_functions
        for slot, number in HOLDERS.get(type(at).__name__, ()):
            if edges[number] == wanted and getattr(at, f"_raw_saved_{slot}").data is not None:
                return Holder(path, number, slot)
        found.extend([((*path, n), e[0]) for n, e in enumerate(edges)])
    return None


def oldest_edge(node: Any, edges: list[int]) -> int | None:
    """The edge that leads to the oldest node; None: there is no node."""
    below = node.next_functions
    known = [edge for edge in edges if below[edge][0] is not None]
    return min(known, key=lambda edge: below[edge][0]._sequence_nr(), default=None)  # noqa: SLF001
