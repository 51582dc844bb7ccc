"""The largest batch that a GPU holds, plain, checkpointed, and with `fit="device"`: simulated.

Each leaves `RESERVE` of the device's memory, as the goal does. With the goal,
`handle.largest_batch()` predicts the batch, from a step of the largest plain one; a batch counts
once it has trained.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from bench.twin.methods import CHECKPOINT, DEVICE_GOAL, PLAIN
from bench.twin.profiles import PROFILES
from bench.twin.runs import JOBS, FailedError, call
from cswap.fit.whole_device import RESERVE

MODELS: Final = ("gpt2-medium", "resnet50", "vit-l16")
"""Of `bench.twin.models`."""

GPUS: Final = ("rtx4090-pcie4",)
"""Of `bench.twin.profiles`. The twin needs address space for the device's memory: more than most
machines give for a larger one."""

N_STEPS: Final = 3
"""Of a training without cswap: its steps are alike, once the optimizer has its state."""

FINE: Final = 1 / 16
"""Share of the largest batch up to which it is found."""

LESS: Final = 0.92
"""Factor of a predicted batch that did not fit."""

EVEN: Final = 8
"""Larger batches are multiples of this: 586 pictures of 197 tokens, say, give matrix products sizes
with which tensor cores are half as fast."""

MOST_TRIES: Final = 8


def largest(model: str, profile: str) -> list[dict[str, Any]]:
    """A row per way: the largest batch, its step and peak; or why there is none."""
    same = {"model": model, "profile": profile}
    blind = [{**same, "method": way, "n_steps": N_STEPS} for way in (PLAIN, CHECKPOINT)]
    with ThreadPoolExecutor(JOBS) as pool:
        plain, checkpointed = pool.map(_bisected, blind)
    return [plain, checkpointed, _by_the_goal({**same, "method": DEVICE_GOAL}, plain)]


def _trained(same: dict[str, Any], batch: int) -> dict[str, Any] | None:
    # The row of a batch; None: it takes more than it may.
    try:
        row: dict[str, Any] = call("worker", {**same, "batch": batch})
    except FailedError as error:
        if "OutOfMemoryError" in str(error):
            return None
        raise
    usable = (1 - RESERVE) * PROFILES[same["profile"]].device_bytes
    return {**row, "batch": batch} if row["peak_bytes"] <= usable else None


def _bisected(same: dict[str, Any]) -> dict[str, Any]:
    fits: dict[str, Any] | None = None
    low, high = 0, 1
    while (row := _trained(same, high)) is not None:
        fits, low, high = row, high, 2 * high
    while high - low > max(1, FINE * low):
        middle = (low + high) // 2
        row = _trained(same, middle)
        if row is None:
            high = middle
        else:
            fits, low = row, middle
    return fits or {**same, "failure": "no batch fits"}


def _by_the_goal(same: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    batch = plain.get("batch", 1)
    fits = _trained(same, batch)
    predicted = 0 if fits is None else _even(batch * (fits["largest_batch"] or 1.0))
    for _ in range(MOST_TRIES):
        if predicted <= batch:
            break
        if (row := _trained(same, predicted)) is not None:
            return row
        predicted = _even(LESS * predicted)
    return fits or {**same, "failure": "no batch fits"}


def _even(batch: float) -> int:
    return int(batch) // EVEN * EVEN if batch > EVEN else int(batch)
