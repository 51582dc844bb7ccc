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
