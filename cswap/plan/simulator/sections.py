"""Sections: a trace in which tensors are cut into several smaller tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cswap.schema.trace import Trace, TraceTensor


MOST_SECTIONS: Final = 1 << 14
"""Largest number of sections of all tensors of a step: with more, a simulation takes hours."""


def split(trace: Trace, section_bytes: Mapping[int, int]) -> tuple[Trace, list[int]]:
    """Cut tensors into sections that a simulation moves one by one.

    Every section has the producer, the users and the ratios of its tensor.

    Args:
        trace: the step.
        section_bytes: raw bytes of a section, by tensor index; the last section may be shorter.

    Returns:
        The new trace, and for each of its tensors the index of the tensor that it was cut from.
        Saved positions have new numbers; sections of one tensor follow each other.

    Raises:
        ConfigError: there would be more than `MOST_SECTIONS` sections.

    >>> from cswap.schema.trace import Trace, TraceOperator, TraceTensor
    >>> f = TraceOperator("f", "other", "forward", 1.0, (), (0,))
    >>> trace, origin = split(Trace((f,), (TraceTensor(10, name="x", saved=0),)), {0: 4})
    >>> [(t.name, t.nbytes, t.saved) for t in trace.tensors], origin
    ([('x[1/3]', 4, 0), ('x[2/3]', 4, 1), ('x[3/3]', 2, 2)], [0, 0, 0])
    """
    cuts = sum(-(-trace.tensors[t].nbytes // nbytes) for t, nbytes in section_bytes.items())
    if cuts > MOST_SECTIONS:
        raise ConfigError(
            f"plan.decisions: section_bytes would cut tensors into {cuts} sections; the most that "
            f"can be simulated are {MOST_SECTIONS}. Give larger section_bytes."
        )
    pieces: list[TraceTensor] = []
    origin: list[int] = []
    places: list[tuple[int, ...]] = []
    for index, tensor in enumerate(trace.tensors):
        cut = _cut(tensor, section_bytes.get(index, tensor.nbytes))
        places.append(tuple(range(len(pieces), len(pieces) + len(cut))))
        pieces += cut
        origin += [index] * len(cut)
    saved = [i for i in range(len(pieces)) if pieces[i].saved >= 0]
    saved.sort(key=lambda i: (pieces[i].saved, i))
    for position, i in enumerate(saved):
        pieces[i] = replace(pieces[i], saved=position)
    operators = tuple(
        replace(
            operator,
            inputs=tuple(i for t in operator.inputs for i in places[t]),
            outputs=tuple(i for t in operator.outputs for i in places[t]),
            writes=tuple(i for t in operator.writes for i in places[t]),
        )
        for operator in trace.operators
    )
    return replace(trace, operators=operators, tensors=tuple(pieces)), origin


def _cut(tensor: TraceTensor, section_bytes: int) -> list[TraceTensor]:
    count = -(-tensor.nbytes // section_bytes) if section_bytes else 1
    if count <= 1:
        return [tensor]
    sizes = [section_bytes] * (count - 1) + [tensor.nbytes - section_bytes * (count - 1)]
    return [
        replace(tensor, nbytes=size, name=f"{tensor.name}[{i + 1}/{count}]", shape=())
        for i, size in enumerate(sizes)
    ]
