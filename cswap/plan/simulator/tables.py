"""Builds the tables of the simulator's inner loop from a trace and a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.simulator import state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cswap.plan.hardware import Hardware
    from cswap.plan.simulator.lifetimes import Lifetimes
    from cswap.schema.trace import Trace


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables that all candidates of one simulator share.

    Attributes:
        n: i64 template of the inner loop's integers, without rows for a timeline.
        x: f64 template of its seconds.
        encoded: [n, codecs] i64 bytes on the link.
        seconds: [n, codecs, 4] encode, decode, D2H, H2D; each while nothing else runs.
        positions: [n, 4] i64 tensor, forward, backward, order.
    """

    n: NDArray[np.int64]
    x: NDArray[np.float64]
    encoded: NDArray[np.int64]
    seconds: NDArray[np.float64]
    positions: NDArray[np.int64]


def build(
    trace: Trace, hardware: Hardware, life: Lifetimes, budget_bytes: int, drain: bool
) -> Tables:
    """Build the tables; codecs are in the order of `codec_names`."""
    encoded, positions = encoded_bytes(trace, hardware, life), _positions(life)
    n, m = _integers(trace, life, positions), len(trace.operators)
    n[[state.BUDGET, state.HOST_BUDGET]] = budget_bytes, hardware.host_memory_bytes
    there = (t.nbytes for t, p in zip(trace.tensors, life.producer, strict=True) if p < 0)
    n[[state.START_BYTES, state.DRAIN]] = trace.resident_bytes + sum(there), drain
    n[state.UNIFIED] = hardware.unified
    n[state.DURATIONS], n[state.SECONDS] = state.X_SIZE, state.X_SIZE + m
    n[state.SPANS_AT] = state.X_SIZE + m + 4 * len(positions)
    x = np.zeros(n[state.SPANS_AT], np.float64)
    x[[state.TAX, state.DUPLEX]] = hardware.codec_tax, hardware.duplex_factor
    x[state.X_SIZE : state.X_SIZE + m] = [operator.duration_s for operator in trace.operators]
    seconds = _seconds(trace, hardware, life, encoded)
    return Tables(n, x, encoded, seconds, positions)


def _integers(trace: Trace, life: Lifetimes, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The template of the integers: sizes, tables, and space for the candidate and the state."""
    m, size, count = len(trace.operators), len(trace.tensors), len(positions)
    tables = {
        state.OPERATORS: _operators(trace, life),
        state.TENSORS: _tensors(trace, life).ravel(),
        state.POSITIONS: positions.ravel(),
    }
    room = {
        **dict.fromkeys((state.STATUS, state.USES), size),
        **dict.fromkeys((state.BEGUN, state.ACTION, state.CODEC, state.PREFETCH), count),
        state.ENCODED: count,
        state.QUEUE: 3 * count,
        state.WORK: 3 * m,
        state.PEAKS: m,
    }
    regions = tables | {region: np.zeros(length, np.int64) for region, length in room.items()}
    head, end = np.zeros(state.N_SIZE, np.int64), state.N_SIZE
    for region, values in regions.items():
        head[region] = end
        end += values.size
    head[[state.N_OPERATORS, state.N_TENSORS, state.N_POSITIONS]] = m, size, count
    rows = tables[state.OPERATORS][: (m + 1) * state.OPERATOR_COLUMNS].reshape(m + 1, -1)
    rows[:, state.INPUTS :] += head[state.OPERATORS]  # a view: makes the list indices absolute
    return np.concatenate([head, *regions.values()])


def _positions(life: Lifetimes) -> NDArray[np.int64]:
    positions = np.zeros((len(life.swappable), state.POSITION_COLUMNS), np.int64)
    for position, t in enumerate(life.swappable):
        positions[position, : state.ORDER] = t, life.forward[t], life.backward[t]
    by_use = np.lexsort((np.arange(len(positions)), positions[:, state.BACKWARD]))
    positions[:, state.ORDER] = by_use
    return positions


def codec_names(hardware: Hardware, trace: Trace) -> tuple[str, ...]:
    """Names of codecs: raw, the hardware's codecs by name, and parametrised codecs of the trace.

    A parametrised codec, such as ``zfp:12``, has the rate of its family, such as ``zfp``.
    """
    named = {name for tensor in trace.tensors for name in tensor.ratios if ":" in name}
    members = sorted(n for n in named - {*hardware.codecs} if _family(n) in hardware.codecs)
    return ("raw", *sorted(name for name in hardware.codecs if name != "raw"), *members)


def _family(name: str) -> str:
    return name.partition(":")[0]


def encoded_bytes(trace: Trace, hardware: Hardware, life: Lifetimes) -> NDArray[np.int64]:
    """[n, codecs] bytes that the link moves, rounded up; raw bytes where no ratio is known."""
    names = codec_names(hardware, trace)
    encoded = np.zeros((len(life.swappable), len(names)), np.int64)
    for position, t in enumerate(life.swappable):
        tensor = trace.tensors[t]
        for column, name in enumerate(names):
            ratio = tensor.ratios.get(name, 1.0) if column else 1.0
            encoded[position, column] = max(1, int(np.ceil(tensor.nbytes / ratio)))
    return encoded


def _seconds(
    trace: Trace, hardware: Hardware, life: Lifetimes, encoded: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[n, codecs, 4] seconds of encode, decode, D2H and H2D; each while nothing else runs."""
    raw = np.array([trace.tensors[t].nbytes for t in life.swappable], np.float64)
    seconds = np.zeros((*encoded.shape, 4), np.float64)
    for column, name in enumerate(codec_names(hardware, trace)):
        if column:
            rate = hardware.codecs.get(name) or hardware.codecs[_family(name)]
            seconds[:, column, 0] = rate.overhead_s + raw / rate.encode_bytes_per_s
            seconds[:, column, 1] = rate.overhead_s + raw / rate.decode_bytes_per_s
    if hardware.unified:
        return seconds
    seconds[:, :, 2] = hardware.link_latency_s + encoded / hardware.d2h_bytes_per_s
    seconds[:, :, 3] = hardware.link_latency_s + encoded / hardware.h2d_bytes_per_s
    return seconds


def _tensors(trace: Trace, life: Lifetimes) -> NDArray[np.int64]:
    tensors = np.full((len(trace.tensors), 3), -1, np.int64)
    for t, tensor in enumerate(trace.tensors):
        tensors[t, :2] = tensor.nbytes, life.producer[t]
    for position, t in enumerate(life.swappable):
        tensors[t, 2] = position
    return tensors


def _operators(trace: Trace, life: Lifetimes) -> NDArray[np.int64]:
    """The operators' table and its lists; indices are relative to the begin of the table."""
    m = len(trace.operators)
    dying: list[list[int]] = [[] for _ in range(m)]
    leaving: list[list[int]] = [[] for _ in range(m)]
    for t in range(len(trace.tensors)):
        dying[life.last_use[t]].append(t)
    for position, t in enumerate(life.swappable):
        leaving[life.forward[t]].append(position)
    rows = np.zeros((m + 1, state.OPERATOR_COLUMNS), np.int64)
    index: list[int] = []
    lists: tuple[tuple[int, Sequence[Sequence[int]]], ...] = (
        (state.INPUTS, [operator.inputs for operator in trace.operators]),
        (state.OUTPUTS, [operator.outputs for operator in trace.operators]),
        (state.DYING, dying),
        (state.LEAVING, leaving),
    )
    for column, members in lists:
        for k, each in enumerate(members):
            rows[k, column] = rows.size + len(index)
            index += each
        rows[m, column] = rows.size + len(index)
    for k, operator in enumerate(trace.operators):
        made = sum(trace.tensors[t].nbytes for t in operator.outputs)
        rows[k, state.NEED] = made + operator.workspace_bytes
        rows[k, state.WORKSPACE] = operator.workspace_bytes
    return np.concatenate([rows.ravel(), np.array(index, np.int64)])
