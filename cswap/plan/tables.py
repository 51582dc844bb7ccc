"""From a trace and a machine to the tables of the simulator's inner loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.state import (
    BUDGET,
    DRAIN,
    DYING,
    HOST_BUDGET,
    INPUTS,
    LEAVING,
    NEED,
    OUTPUTS,
    START_BYTES,
    WORKSPACE,
    Tables,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from cswap.plan.hardware import Hardware
    from cswap.plan.lifetimes import Lifetimes
    from cswap.schema.trace import Trace


def build(
    trace: Trace, hardware: Hardware, life: Lifetimes, budget_bytes: int, drain: bool
) -> Tables:
    """The tables; codecs are raw, then those of the hardware, as `codec_names` has them."""
    encoded = encoded_bytes(trace, hardware, life)
    start = sum(t.nbytes for t, p in zip(trace.tensors, life.producer, strict=True) if p < 0)
    operators, index = _operators(trace, life)
    positions = np.zeros((len(life.swappable), 4), np.int64)
    for position, t in enumerate(life.swappable):
        positions[position, :3] = t, life.forward[t], life.backward[t]
    positions[:, 3] = np.lexsort((np.arange(len(positions)), positions[:, 2]))
    limits = np.zeros(4, np.int64)
    limits[BUDGET], limits[HOST_BUDGET] = budget_bytes, hardware.host_memory_bytes
    limits[START_BYTES], limits[DRAIN] = trace.resident_bytes + start, drain
    return Tables(
        duration_s=np.array([o.duration_s for o in trace.operators], np.float64),
        operators=operators,
        index=index,
        tensors=_tensors(trace, life),
        positions=positions,
        encoded=encoded,
        seconds=_seconds(trace, hardware, life, encoded),
        tax=float(hardware.codec_tax),
        duplex=float(hardware.duplex_factor),
        limits=limits,
    )


def codec_names(hardware: Hardware) -> tuple[str, ...]:
    """Raw, then the hardware's codecs by name."""
    return ("raw", *sorted(name for name in hardware.codecs if name != "raw"))


def encoded_bytes(trace: Trace, hardware: Hardware, life: Lifetimes) -> NDArray[np.int64]:
    """[n, codecs] bytes on the link, rounded up; raw bytes where no ratio is known."""
    names = codec_names(hardware)
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
    """[n, codecs, 4] encode, decode, D2H, H2D, each alone."""
    raw = np.array([trace.tensors[t].nbytes for t in life.swappable], np.float64)
    seconds = np.zeros((*encoded.shape, 4), np.float64)
    for column, name in enumerate(codec_names(hardware)):
        if column:
            rate = hardware.codecs[name]
            seconds[:, column, 0] = rate.overhead_s + raw / rate.encode_bytes_per_s
            seconds[:, column, 1] = rate.overhead_s + raw / rate.decode_bytes_per_s
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


def _operators(trace: Trace, life: Lifetimes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of `Tables.operators`, and the lists that their ranges point to."""
    m = len(trace.operators)
    dying: list[list[int]] = [[] for _ in range(m)]
    leaving: list[list[int]] = [[] for _ in range(m)]
    for t in range(len(trace.tensors)):
        dying[life.last_use[t]].append(t)
    for position, t in enumerate(life.swappable):
        leaving[life.forward[t]].append(position)
    rows = np.zeros((m + 1, 6), np.int64)
    index: list[int] = []
    lists: tuple[tuple[int, Sequence[Sequence[int]]], ...] = (
        (INPUTS, [o.inputs for o in trace.operators]),
        (OUTPUTS, [o.outputs for o in trace.operators]),
        (DYING, dying),
        (LEAVING, leaving),
    )
    for column, members in lists:
        for k, each in enumerate(members):
            rows[k, column] = len(index)
            index += each
        rows[m, column] = len(index)
    for k, operator in enumerate(trace.operators):
        made = sum(trace.tensors[t].nbytes for t in operator.outputs)
        rows[k, NEED], rows[k, WORKSPACE] = (
            made + operator.workspace_bytes,
            operator.workspace_bytes,
        )
    return rows, np.array(index, np.int64)
