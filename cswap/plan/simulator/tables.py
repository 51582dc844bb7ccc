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
class Template:
    """The tables that all candidates of one simulator share.

    Attributes:
        step: [1] the record of scalars before the step.
        tables: the tables before the step.
        encoded: [n, codecs] i64 bytes on the link.
        seconds: [n, codecs, 4] encode, decode, D2H, H2D; each while nothing else runs.
    """

    step: NDArray[np.void]
    tables: state.Tables
    encoded: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def candidate(
        self,
        action: NDArray[np.integer],
        codec: NDArray[np.integer],
        prefetch: NDArray[np.integer],
    ) -> tuple[object, ...]:
        """The arguments of `loop.run` for a candidate."""
        choice = _as(action, np.int8), _as(codec, np.int8), _as(prefetch, np.int32)
        return self.step, self.tables, *choice, self.encoded, self.seconds

    def timeless(self) -> Template:
        """The same without time and memory limits; operators and swap-ins wait for swap-outs."""
        step, operators = self.step.copy(), self.tables.operators.copy()
        step["budget_bytes"], step["host_budget_bytes"], step["drain"] = 1 << 62, 0, 1
        operators["duration_s"] = 0.0
        tables = self.tables._replace(operators=operators)
        return Template(step, tables, self.encoded, np.zeros_like(self.seconds))


def build(trace: Trace, hardware: Hardware, life: Lifetimes, budget_bytes: int) -> Template:
    """Build the tables; codecs are in the order of `codec_names`."""
    encoded = encoded_bytes(trace, hardware, life)
    operators, lists = _operators(trace, life)
    tables = state.Tables(
        operators=operators,
        tensors=_tensors(trace, life),
        positions=_positions(life),
        lists=lists,
        makers=np.array([maker for makers in life.makers for maker in makers], np.int64),
        peaks=np.zeros(0, np.int64),
    )
    there = (t.nbytes for t, p in zip(trace.tensors, life.producer, strict=True) if p < 0)
    step = np.zeros(1, state.STEP)
    step["budget_bytes"], step["host_budget_bytes"] = budget_bytes, hardware.host_memory_bytes
    step["start_bytes"] = trace.resident_bytes + sum(there)
    step["unified"] = hardware.unified
    step["tax"], step["duplex"] = hardware.codec_tax, hardware.duplex_factor
    return Template(step, tables, encoded, _seconds(trace, hardware, life, encoded))


def _positions(life: Lifetimes) -> NDArray[np.void]:
    positions = np.zeros(len(life.swappable), state.POSITION)
    positions["tensor"] = life.swappable
    positions["forward"] = [life.forward[t] for t in life.swappable]
    positions["backward"] = [life.backward[t] for t in life.swappable]
    positions["order"] = np.argsort(positions["backward"], kind="stable")
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


def _tensors(trace: Trace, life: Lifetimes) -> NDArray[np.void]:
    tensors = np.zeros(len(trace.tensors), state.TENSOR)
    tensors["raw_bytes"] = [tensor.nbytes for tensor in trace.tensors]
    tensors["producer"] = life.producer
    tensors["position"] = -1
    tensors["position"][list(life.swappable)] = np.arange(len(life.swappable))
    return tensors


def _operators(trace: Trace, life: Lifetimes) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """The operators' table and its lists."""
    m = len(trace.operators)
    dying: list[list[int]] = [[] for _ in range(m)]
    leaving: list[list[int]] = [[] for _ in range(m)]
    for t in range(len(trace.tensors)):
        dying[life.last_use[t]].append(t)
    for position, t in enumerate(life.swappable):
        leaving[life.forward[t]].append(position)
    operators = np.zeros(m + 1, state.OPERATOR)
    lists: list[int] = []
    columns: dict[str, Sequence[Sequence[int]]] = {
        "inputs": [operator.inputs for operator in trace.operators],
        "outputs": [operator.outputs for operator in trace.operators],
        "dying": dying,
        "leaving": leaving,
    }
    for column, members in columns.items():
        begins = np.cumsum([len(lists), *map(len, members)])
        operators[column] = begins
        lists += [index for each in members for index in each]
    made = [sum(trace.tensors[t].nbytes for t in o.outputs) for o in trace.operators]
    operators["workspace_bytes"][:m] = [o.workspace_bytes for o in trace.operators]
    operators["need_bytes"][:m] = made
    operators["need_bytes"] += operators["workspace_bytes"]
    operators["duration_s"][:m] = [o.duration_s for o in trace.operators]
    return operators, np.array(lists, np.int64)


def _as(values: NDArray[np.integer], dtype: type[np.integer]) -> NDArray[np.integer]:
    return np.ascontiguousarray(values, dtype)
