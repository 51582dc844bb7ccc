"""Operators and tensors cut along the batch: tvDNN-style sections of an operator's tensors.

The simulator cuts tensors that are moved; an operator still needs all of its inputs at
once. Here every operator becomes one per section of the batch, which is exact for networks without
statistics over the batch, such as VGG.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cswap.plan.simulator.lifetimes import with_positions

if TYPE_CHECKING:
    from cswap.schema.trace import Trace, TraceOperator, TraceTensor


def by_sections(trace: Trace, count: int, launch_s: float) -> Trace:
    """The trace with everything that has the batch as its first extent in ``count`` sections.

    Each section of an operator takes 1 / count of its time, plus a launch. The first section makes
    tensors without a batch, such as a gradient of weights; the others add to them.

    Args:
        trace: with shapes; its batch must be a multiple of ``count``.
        count: sections.
        launch_s: seconds that starting one more operator takes.
    """
    tensors: list[TraceTensor] = []
    places: list[tuple[int, ...]] = []
    for tensor in trace.tensors:
        n = count if tensor.shape[:1] == (trace.batch,) else 1
        places.append(tuple(range(len(tensors), len(tensors) + n)))
        rest = tensor.shape[1:]
        shape = (trace.batch // count, *rest) if n > 1 else tensor.shape
        tensors += [replace(tensor, nbytes=tensor.nbytes // n, shape=shape)] * n
    operators: list[TraceOperator] = []
    for operator in trace.operators:
        touched = (*operator.inputs, *operator.outputs)
        if operator.phase == "optimizer" or all(len(places[t]) == 1 for t in touched):
            operators.append(_whole(operator, places))
        else:
            operators += [_part(operator, places, i, count, launch_s) for i in range(count)]
    return with_positions(replace(trace, operators=tuple(operators), tensors=_numbered(tensors)))


def _whole(operator: TraceOperator, places: list[tuple[int, ...]]) -> TraceOperator:
    def all_of(tensors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(p for t in tensors for p in places[t])

    return replace(
        operator,
        inputs=all_of(operator.inputs),
        outputs=all_of(operator.outputs),
        writes=all_of(operator.writes),
    )


def _part(
    operator: TraceOperator,
    places: list[tuple[int, ...]],
    index: int,
    count: int,
    launch_s: float,
) -> TraceOperator:
    def mine(tensor: int) -> int:
        return places[tensor][index if len(places[tensor]) > 1 else 0]

    outputs = [t for t in operator.outputs if len(places[t]) > 1 or not index]
    added_to = [t for t in operator.outputs if len(places[t]) == 1 and index]
    return replace(
        operator,
        duration_s=(operator.duration_s - launch_s) / count + launch_s,
        inputs=tuple(dict.fromkeys(mine(t) for t in (*operator.inputs, *added_to))),
        outputs=tuple(mine(t) for t in outputs),
        writes=tuple(dict.fromkeys(mine(t) for t in (*operator.writes, *added_to))),
        workspace_bytes=operator.workspace_bytes // count,
        flops=operator.flops / count,
        bytes_moved=operator.bytes_moved / count,
    )


def _numbered(tensors: list[TraceTensor]) -> tuple[TraceTensor, ...]:
    # Positions are given anew by `with_positions`; until then they must not collide.
    return tuple(replace(t, saved=-1) for t in tensors)
