"""A trace in SwapAdvisor's model: operators with dependencies, tensors that occupy objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cswap.plan.simulator.lifetimes import lifetimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cswap.plan.hardware import Hardware
    from cswap.schema.trace import Trace

    Ints = NDArray[np.int64]


class Lists(NamedTuple):
    """Rows of different lengths: row i is ``items[at[i]:at[i + 1]]``."""

    at: Ints
    items: Ints


@dataclass(frozen=True, slots=True)
class Graph:
    """The data that all chromosomes of one search share.

    Attributes:
        seconds: [m] duration of each operator.
        inputs: tensors that each operator reads.
        outputs: tensors that each operator makes.
        after: operators that wait for each operator.
        n_before: [m] operators that each one waits for.
        sizes: TS: sorted unique bytes of tensors.
        size_of: [t] place of each tensor in TS.
        nbytes: [t] bytes.
        n_uses: [t] number of operators that read the tensor.
        n_forward: [t] number of uses (production, forward reads) before the tensor may leave in
            its gap.
        leaves: [t] whether the tensor may leave, once, in its gap: between its last forward use and
            its first backward use. An engine can do only this.
        d2h_s: [t] seconds to copy the tensor out.
        h2d_s: [t] seconds to copy the tensor in.
    """

    seconds: NDArray[np.float64]
    inputs: Lists
    outputs: Lists
    after: tuple[tuple[int, ...], ...]
    n_before: Ints
    sizes: Ints
    size_of: Ints
    nbytes: Ints
    n_uses: Ints
    n_forward: Ints
    leaves: NDArray[np.bool_]
    d2h_s: NDArray[np.float64]
    h2d_s: NDArray[np.float64]


def graph_of(trace: Trace, hardware: Hardware) -> Graph:
    """The graph of a trace.

    Args:
        trace: the step.
        hardware: the machine, for the seconds of copies. Each direction has the share
            ``duplex_factor`` of its rate, because swap-outs and swap-ins come in pairs.
    """
    operators, tensors, life = trace.operators, trace.tensors, lifetimes(trace)
    nbytes = np.array([t.nbytes for t in tensors], np.int64)
    sizes, size_of = np.unique(nbytes, return_inverse=True)
    after = _after(trace, life.producer)
    leaves = np.zeros(len(tensors), np.bool_)
    leaves[list(life.swappable)] = True
    forward = [
        (life.producer[t] >= 0) + sum(operators[u].phase == "forward" for u in life.users[t])
        for t in range(len(tensors))
    ]
    return Graph(
        seconds=np.array([o.duration_s for o in operators], np.float64),
        inputs=_lists([o.inputs for o in operators]),
        outputs=_lists([o.outputs for o in operators]),
        after=after,
        n_before=np.bincount([k for row in after for k in row], minlength=len(operators)),
        sizes=sizes,
        size_of=np.asarray(size_of, np.int64),
        nbytes=nbytes,
        n_uses=np.array([len(users) for users in life.users], np.int64),
        n_forward=np.array(forward, np.int64),
        leaves=leaves,
        d2h_s=_copy_s(nbytes, hardware.d2h_bytes_per_s, hardware),
        h2d_s=_copy_s(nbytes, hardware.h2d_bytes_per_s, hardware),
    )


def _copy_s(nbytes: Ints, rate: float, hardware: Hardware) -> NDArray[np.float64]:
    return hardware.link_latency_s + nbytes / (rate * hardware.duplex_factor)


def _lists(rows: Sequence[Sequence[int]]) -> Lists:
    at = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
    return Lists(at.astype(np.int64), np.array([i for row in rows for i in row], np.int64))


def _after(trace: Trace, producer: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    # Readers wait for producers. An operator without outputs writes to its inputs. So it waits for
    # all earlier users of these inputs, and all later users wait for it.
    after: list[set[int]] = [set() for _ in trace.operators]
    wrote = list(producer)
    readers: list[list[int]] = [[] for _ in trace.tensors]
    for k, operator in enumerate(trace.operators):
        for t in operator.inputs:
            if wrote[t] >= 0:
                after[wrote[t]].add(k)
            if operator.outputs:
                readers[t].append(k)
                continue
            for reader in readers[t]:
                after[reader].add(k)
            wrote[t], readers[t] = k, []
    return tuple(tuple(sorted(row)) for row in after)
