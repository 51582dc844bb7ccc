"""Saved tensors whose values backward never reads.

Note [slots that backward does not read]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Some formulas of torch's backward take a saved tensor only for its sizes, dtype, order and device:
``gather`` saves the tensor that it has picked from, though the indices say where each gradient
goes. Any values give the same gradients there, of any order (``create_graph=True``, too).

A row is right if the test says so that puts NaN into the slot, for every operator of torch's own
database (tests/remat/test_unread.py). It lists slots that could become rows as well.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import FrameType

    import torch

_POOLS: Final = (
    *("AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D"),
    *("AvgPool2D", "AvgPool3D", "FractionalMaxPool2D", "FractionalMaxPool3D"),
    *("MaxPool2DWithIndices", "MaxPool3DWithIndices"),
)

_PADS: Final = tuple(f"{kind}Pad{n}D" for kind in ("Reflection", "Replication") for n in (1, 2, 3))

_PICKS: Final = ("Gather", "MaskedSelect", "Take", "Cummax", "Cummin", "NllLoss", "NllLoss2D")

UNREAD: Final = {
    **{f"{name}Backward0": "self" for name in (*_POOLS, *_PADS, *_PICKS)},
    **{f"{name}Backward0": "source" for name in ("IndexAdd", "IndexCopy", "Put")},
}
"""Name of a node, and its saved argument that its backward does not read."""

MOST_NODES: Final = 64
"""Nodes that are looked at for the one that has just saved a tensor."""

_ENGINE: Final = "_engine_run_backward", "torch.autograd.graph"
"""Name and module of the function that calls autograd's engine, which runs nodes of a CPU in the
same thread."""

_OURS: Final = __name__.partition(".")[0] + "."


def unread_slot(node: Any, packed: object) -> str | None:
    """The attribute of a node's slot that holds this object, if backward does not read it.

    Args:
        node: of autograd, or None.
        packed: returned by a pack hook.
    """
    # Nodes of users' functions have names without a number at the end.
    name = UNREAD.get(type(node).__name__)
    if name is None:
        return None
    slot = f"_raw_saved_{name}"
    try:
        return slot if getattr(node, slot).data is packed else None
    except RuntimeError:  # it was freed
        return None


def node_below(tensor: torch.Tensor, number: int, newest: int) -> Any:
    """The node with a sequence number among those that have made a tensor; None: it is not found.

    The number of a node is above those of the nodes that have made its inputs.

    Args:
        tensor: that is being saved.
        number: of the node.
        newest: number of the newest node of this thread.
    """
    try:
        waiting = [tensor.grad_fn]
        seen = set(waiting)
        while waiting and len(seen) < MOST_NODES:
            node = waiting.pop()
            # A leaf's node has the largest number that there is.
            if node is None or not number <= (its := node._sequence_nr()) <= newest:  # noqa: SLF001
                continue
            if its == number:
                return node
            below = {one for one, _ in node.next_functions} - seen
            seen |= below
            waiting += below
    except (RuntimeError, AttributeError):  # a view that was written into; a freed node
        pass
    return None


def asked_by_engine() -> bool:
    """Whether autograd's engine has called the hook in which this is asked, to run a node.

    Else Python code may be reading a node's attribute, as a hook of a node does in a backward. Or
    it has called the engine by another function of torch's.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    # Above ours, a GPU's thread has no frames.
    return frame is None or (frame.f_code.co_name, frame.f_globals.get("__name__")) == _ENGINE
