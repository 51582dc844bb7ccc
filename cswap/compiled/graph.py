"""Which of the values that a compiled graph saves must stay exact.

Note [exponentials]
~~~~~~~~~~~~~~~~~~~
An error of a logarithm or of a softmax's input becomes a relative error of the whole probability.
So a value that backward gives to an exponential keeps its bits: logits of a loss, the sums of
logarithms that an attention saves, and the inputs of a softmax. Results of reductions stay, too:
they are small, and many values depend on each.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.fx import Node

_EXPONENTIALS: Final = frozenset(
    {"exp", "exp2", "expm1", "_softmax_backward_data", "_log_softmax_backward_data"}
)
_PASSED: Final = frozenset(
    {
        "add",
        "sub",
        "convert_element_type",
        "_to_copy",
        "view",
        "reshape",
        "_unsafe_view",
        "unsqueeze",
        "squeeze",
        "expand",
        "permute",
        "t",
        "transpose",
        "clone",
        "detach",
        "alias",
    }
)
"""Operators after which a value still is an exponent."""

_SCALED: Final = frozenset({"mul", "div"})
"""Likewise, with a number as the other factor."""

_REDUCTIONS: Final = frozenset(
    {"sum", "mean", "amax", "amin", "var", "var_mean", "logsumexp", "rsqrt"}
)
"""Operators whose results stay exact, and the root that a norm takes of one."""

MOST_STEPS: Final = 6
"""Operators that are followed from a saved value."""


def must_stay_exact(graphs: dict[str, Any]) -> bool:
    """Whether the value is one of Note [exponentials].

    Args:
        graphs: torch's record of the saved value: its node and the graphs of forward and backward.
    """
    node = graphs["_node"]
    if node.target is operator.getitem and node.args[1] != 0:  # statistics beside a result
        return True
    if _name(node) in _REDUCTIONS:
        return True
    saved = [n for n in graphs["_bw_graph"].find_nodes(op="placeholder") if n.name == node.name]
    return any(_reaches_exponential(n, MOST_STEPS) for n in saved)


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", "")


def _reaches_exponential(node: Node, steps: int) -> bool:
    for user in node.users:
        name = _name(user)
        if name in _EXPONENTIALS:
            return True
        passes = name in _PASSED or (name in _SCALED and _has_number(user))
        if steps and passes and _reaches_exponential(user, steps - 1):
            return True
    return False


def _has_number(node: Node) -> bool:
    return any(isinstance(argument, int | float) for argument in node.args)
