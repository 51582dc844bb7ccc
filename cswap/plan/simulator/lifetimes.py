"""For each tensor of a trace: its producer, its users, and the gap in which it may be away."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cswap.schema.trace import Trace

SWAPPABLE_ROLES: Final = ("activation", "input")


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Operator indices by tensor index; -1 where there is none.

    Attributes:
        producer: operator that produces the tensor; -1: it exists when the step starts.
        users: operators that read the tensor, ascending.
        makers: for each operator, and each of its inputs, the tensor's producer or, if later, the
            last forward operator before this one that wrote to it in place; -1 where there is none.
            A writer has the tensor among its inputs, so its own makers lead on to the producer.
        last_use: operator at whose end the tensor dies: its last user, or its producer if no
            operator reads it.
        forward: the last forward operator before any backward use that produces or reads the
            tensor.
        backward: the first operator of another phase that reads the tensor.
        swappable: tensors that a plan may name, in the order of their positions. They are saved,
            have more than 0 bytes, are activations or inputs, and are used in forward and later in
            backward.
    """

    producer: tuple[int, ...]
    users: tuple[tuple[int, ...], ...]
    makers: tuple[tuple[int, ...], ...]
    last_use: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    swappable: tuple[int, ...]


def lifetimes(trace: Trace) -> Lifetimes:
    """Lifetimes of a trace's tensors.

    >>> from cswap.schema.trace import Trace, TraceOperator, TraceTensor
    >>> forward = TraceOperator("f", "other", "forward", 1.0, (), (0,))
    >>> backward = TraceOperator("b", "other", "backward", 1.0, (0,), ())
    >>> lifetimes(Trace((forward, backward), (TraceTensor(8, saved=0),))).swappable
    (0,)
    """
    producer = [-1] * len(trace.tensors)
    users: list[list[int]] = [[] for _ in trace.tensors]
    for index, operator in enumerate(trace.operators):
        for tensor in operator.outputs:
            producer[tensor] = index
        for tensor in operator.inputs:
            users[tensor].append(index)
    gaps = [_gap(trace, p, u) for p, u in zip(producer, users, strict=True)]
    named = [i for i in range(len(gaps)) if min(gaps[i]) >= 0 and _may_leave(trace, i)]
    return Lifetimes(
        producer=tuple(producer),
        users=tuple(tuple(u) for u in users),
        makers=_makers(trace),
        last_use=tuple(u[-1] if u else p for p, u in zip(producer, users, strict=True)),
        forward=tuple(f for f, _ in gaps),
        backward=tuple(b for _, b in gaps),
        swappable=tuple(sorted(named, key=lambda i: trace.tensors[i].saved)),
    )


def chain(trace: Trace, life: Lifetimes, tensor: int) -> set[int] | None:
    """Operators that compute a tensor again, for its first backward use, from what then lives.

    The estimate assumes that all saved tensors are kept. None: a source is gone for good.
    """
    backward = life.backward[tensor]
    found: set[int] = set()
    stack = [life.makers[backward][trace.operators[backward].inputs.index(tensor)]]
    while stack:
        maker = stack.pop()
        if maker < 0:
            return None
        if maker in found:
            continue
        found.add(maker)
        sources = zip(trace.operators[maker].inputs, life.makers[maker], strict=True)
        stack += [m for s, m in sources if s == tensor or life.last_use[s] < backward]
    return found


def _makers(trace: Trace) -> tuple[tuple[int, ...], ...]:
    wrote = [-1] * len(trace.tensors)
    makers: list[tuple[int, ...]] = []
    for index, operator in enumerate(trace.operators):
        makers.append(tuple(wrote[t] for t in operator.inputs))
        for t in operator.outputs:
            wrote[t] = index
        if operator.phase == "forward":
            for t in operator.writes:
                wrote[t] = index
    return tuple(makers)


def _gap(trace: Trace, producer: int, users: list[int]) -> tuple[int, int]:
    """Last forward use before the first backward use, and the latter; -1 where there is none."""
    backward = next((u for u in users if trace.operators[u].phase != "forward"), -1)
    touched = [producer] * (producer >= 0) + [u for u in users if u < backward or backward < 0]
    forward = [i for i in touched if trace.operators[i].phase == "forward"]
    return (forward[-1] if forward else -1), backward


def _may_leave(trace: Trace, index: int) -> bool:
    tensor = trace.tensors[index]
    return tensor.saved >= 0 and tensor.nbytes > 0 and tensor.role in SWAPPABLE_ROLES


def fingerprint(trace: Trace) -> str:
    """16 hex digits of the trace's structure: phases, inputs, outputs, and the tensors' bytes.

    Durations, ratios and names are not included. So an estimated and a measured trace of the same
    step have the same fingerprint.
    """
    structure = [
        [(o.phase, o.inputs, o.outputs) for o in trace.operators],
        [(t.nbytes, t.dtype, t.saved) for t in trace.tensors],
    ]
    return hashlib.sha256(json.dumps(structure).encode()).hexdigest()[:16]


def live_bytes(trace: Trace) -> list[int]:
    """Device bytes while each operator runs if no tensor ever leaves, workspace included."""
    life = lifetimes(trace)
    change = [0] * (len(trace.operators) + 1)
    for index, tensor in enumerate(trace.tensors):
        change[max(life.producer[index], 0)] += tensor.nbytes
        change[life.last_use[index] + 1] -= tensor.nbytes
    live, rows = trace.resident_bytes, []
    for index, operator in enumerate(trace.operators):
        live += change[index]
        rows.append(live + operator.workspace_bytes)
    return rows
