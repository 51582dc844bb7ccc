"""A trace whose operators run in another order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.schema.trace import Trace


def reordered(trace: Trace, order: Sequence[int]) -> Trace:
    """The trace with its operators in the given order, ``operators[order[0]]`` first.

    Raises:
        ConfigError: the order is not a permutation of the trace's operators.
        TraceError: a tensor would be used before it is produced.
    """
    if sorted(order) != list(range(len(trace.operators))):
        raise ConfigError(
            f"plan.order: must name each of the trace's {len(trace.operators)} operators once."
        )
    return replace(trace, operators=tuple(trace.operators[k] for k in order))


def updated_early(trace: Trace) -> Trace:
    """The trace with each update of a parameter moved to just after the last use of its inputs.

    >>> from cswap.schema.trace import Trace, TraceOperator, TraceTensor
    >>> w, g, h = TraceTensor(8, role="parameter"), TraceTensor(8), TraceTensor(8)
    >>> make = TraceOperator("g", "other", "backward", 1.0, (0,), (1,))
    >>> more = TraceOperator("h", "other", "backward", 1.0, (), (2,))
    >>> update = TraceOperator("u", "optimizer", "optimizer", 1.0, (0, 1), ())
    >>> [o.name for o in updated_early(Trace((make, more, update), (w, g, h))).operators]
    ['g', 'u', 'h']
    """
    touched: dict[int, int] = {}
    after: dict[int, list[int]] = {}
    for k, operator in enumerate(trace.operators):
        if operator.kind == "optimizer":
            last = max((touched.get(t, -1) for t in operator.inputs), default=-1)
            after.setdefault(last, []).append(k)
        else:
            touched.update(dict.fromkeys((*operator.inputs, *operator.outputs), k))
    order = list(after.get(-1, []))
    for k, operator in enumerate(trace.operators):
        if operator.kind != "optimizer":
            order += [k, *after.get(k, [])]
    return reordered(trace, order)
