"""The state of the simulator's inner loop: a record of scalars ``s``, and tables ``g`` of records.

Each row of a table is a record, too: ``g.tensors[t].status`` is a field that compiled code can set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from cswap_kernels.uncounted import inlined

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Status of a tensor. From OUT to DECODE an operator that reads it may have to wait. OUT: its raw
# bytes are still on the device. SENT: only its encoding is.
ABSENT, DEVICE, OUT, SENT, HOST, IN, DECODE, DROPPED, DEAD, TEMP = range(10)

OVER_DEVICE, OVER_HOST, LOST_ANCESTOR, STUCK = 1, 2, 4, 8


def _record(integers: str, seconds: str) -> np.dtype[np.void]:
    """A type of records whose fields have the given names: i64, then f64."""
    fields = [(name, "i8") for name in integers.split()]
    fields += [(name, "f8") for name in seconds.split()]
    return np.dtype((np.record, np.dtype(fields, align=True)))


STEP: Final = _record(
    # Limits. host_budget_bytes 0: no limit. drain 1: operators and swap-ins wait for all swap-outs.
    # unified 1: host memory is device memory.
    "budget_bytes host_budget_bytes start_bytes drain unified "
    # Bytes now, and their maxima.
    "device_bytes peak_bytes host_bytes host_peak_bytes link_bytes "
    # The next operator, and the last one that has started. running 1: the next operator runs;
    # running 2: one of the chain does. Of the chain's `chained` operators, `repeated` have ended.
    "operator started running repeated chained "
    # Positions in progress, or -1.
    "codec_job decoding out_job in_job "
    # Queues: entries taken, entries in all. Swap-ins begun, in the order of first backward uses.
    "encodes_begun encodes_queued decodes_begun decodes_queued outs_begun outs_queued fetched "
    # Bits such as OVER_DEVICE; the operator at which the device budget was first exceeded, or -1.
    "flaws first_over",
    # Clocks. Ends of streams that do not run are infinite. Speeds: 1 is full speed.
    "now_s compute_end_s codec_end_s out_end_s in_end_s speed link_speed tax duplex "
    # Device bytes times seconds; exposed seconds by cause.
    "byte_seconds swap_in_s swap_out_s memory_s codec_s recompute_s",
)

OPERATOR: Final = _record(
    # need_bytes: outputs and workspace. inputs to leaving: the index in `lists` at which the
    # operator's list begins; the list ends where the next operator's list begins. inputs, outputs
    # and dying list tensors; leaving lists positions.
    "need_bytes workspace_bytes inputs outputs dying leaving "
    # mark: see `find_chain`. The columns `chain` and `stack` are lists: row i holds entry i.
    "mark chain stack",
    "duration_s",
)

TENSOR: Final = _record(
    # producer: an operator, or -1. position: in the candidate, or -1. uses: see `find_chain`. Not
    # nbytes: NumPy's records have an attribute of that name, which the uncompiled code would read.
    "raw_bytes producer position status uses",
    "",
)

POSITION: Final = _record(
    "tensor forward backward "
    # The candidate; encoded_bytes and the seconds are those of its codec. fetched: its swap-in has
    # begun, or is not needed.
    "action codec prefetch encoded_bytes fetched "
    # Columns that are lists of positions: row i holds entry i. order: by first backward use.
    "order encodes decodes outs",
    "encode_s decode_s out_s in_s",
)


class Tables(NamedTuple):
    """The tables. ``operators`` has one more row, the end of the last operator's lists.

    makers: of the entries of ``lists`` that are inputs of operators, which come first, the operator
    that made or last wrote the input (`Lifetimes.makers`), or -1.

    peaks: a record of the run: maximum of device bytes from the end of the previous operator to the
    operator's own end. Rows beyond its end are not recorded.
    """

    operators: NDArray[np.void]  # OPERATOR
    tensors: NDArray[np.void]  # TENSOR
    positions: NDArray[np.void]  # POSITION
    lists: NDArray[np.int64]
    makers: NDArray[np.int64]
    peaks: NDArray[np.int64]


@inlined
def take(s: Any, g: Tables, nbytes: int) -> None:
    """Take device bytes; note an excess over the budget. Callers check for room."""
    s.device_bytes += nbytes
    s.peak_bytes = max(s.peak_bytes, s.device_bytes)
    if s.device_bytes > s.budget_bytes and not s.flaws & OVER_DEVICE:
        s.flaws |= OVER_DEVICE
        s.first_over = s.operator
    if s.operator < len(g.peaks):
        g.peaks[s.operator] = max(g.peaks[s.operator], s.device_bytes)


@inlined
def set_speed(s: Any) -> None:
    """Set the speed of compute, lower while the codec runs; move the running operator's end."""
    speed = 1.0 if s.codec_job < 0 else 1.0 - s.tax
    if speed != s.speed:
        if s.running:
            s.compute_end_s = s.now_s + (s.compute_end_s - s.now_s) * s.speed / speed
        s.speed = speed


@inlined
def set_link_speed(s: Any) -> None:
    """Set the link's speed, lower while both directions are busy; move the copies' ends."""
    speed = s.duplex if s.out_job >= 0 and s.in_job >= 0 else 1.0
    if speed != s.link_speed:
        if s.out_end_s < np.inf:
            s.out_end_s = s.now_s + (s.out_end_s - s.now_s) * s.link_speed / speed
        if s.in_end_s < np.inf:
            s.in_end_s = s.now_s + (s.in_end_s - s.now_s) * s.link_speed / speed
        s.link_speed = speed


@inlined
def next_operator(s: Any, g: Tables) -> int:
    """The operator that runs next: of the chain, else of the step."""
    k: int = g.operators[s.repeated].chain if s.repeated < s.chained else s.operator
    return k
