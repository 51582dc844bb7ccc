"""Whether another tensor is computed again by a known formula: `Recognition`.

Note [a formula is recognised]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A search is a function of its reads: the types of nodes, their numbers, which slots are empty,
and how deep the packed objects in the others are (reads.py). In the next step the same call site
saves another tensor, made by other nodes. If every read finds the same there as before, the search
would find the same steps, and only the packed objects and the copies of leaves are new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cswap.remat.reads import (
    LOOKS,
    Packed,
    ReadKind,
    below,
    constant,
    facts_of,
    held_leaf,
    is_number,
    leaf,
    plain,
    slot,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.remat.reads import Constant, HoldLeaf, Keep, Read


class Recognition:
    """The reads of a search, to be done again for another tensor."""

    def __init__(self, reads: Sequence[Read]) -> None:
        """Args: reads: of the search, in their order."""
        self._reads = tuple(reads)

    def again(
        self, root: Any, nbytes: int, keep: Keep | None, hold: HoldLeaf | None
    ) -> tuple[tuple[object, ...], tuple[Constant, ...]] | None:
        """The inputs and constants of another tensor of the same call site; None: a read differs.

        Args:
            root: the node that made this one.
            nbytes: of the tensor.
            keep: see `Finder`.
            hold: see `Finder`.

        Raises:
            NotFoundError: a number or a leaf is not of the kind that can be copied or held.
            AttributeError: a node was freed.
        """
        nodes: list[Any] = [root]
        inputs: list[object] = []
        constants: list[Constant] = []
        for kind, number, name, found in self._reads:
            node = nodes[number]
            if (look := LOOKS.get(kind)) is not None:
                if look(node, name) != found:
                    return None
            elif kind is ReadKind.BELOW:
                node, output = below(node, name)
                if (type(node), output) != found:
                    return None
                nodes.append(node)
            elif kind is ReadKind.SAME:
                if node is not nodes[name]:
                    return None
            elif kind is ReadKind.INPUT:
                if not _take_input(node, name, found, inputs, keep):
                    return None
            elif kind is ReadKind.CONSTANT:
                constants.append(constant(slot(node, name)))
            elif kind is ReadKind.LEAF:
                constants.append(leaf(node.variable, nbytes))
            elif hold is None:
                return None
            else:  # of a cast
                constants.append(held_leaf(node.variable, nodes[name], found, hold))
        return tuple(inputs), tuple(constants)


def _take_input(
    node: Any,
    name: str,
    found: tuple[tuple[int, int], int],
    inputs: list[object],
    keep: Keep | None,
) -> bool:
    # Whether the slot has an input as the search found it there: with these facts and this index.
    facts, index = found
    packed = slot(node, name)
    if not isinstance(packed, Packed):
        if keep is None or is_number(packed):
            return False
        packed = plain(node, name, keep)
    if facts_of(packed) != facts:
        return False
    if index < len(inputs):
        return packed is inputs[index]
    if any(packed is known for known in inputs):
        return False
    inputs.append(packed)
    return True
