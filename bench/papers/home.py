"""HOME's figures: throughput at an equal batch, and the largest batch, on an RTX 2080 Ti."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from bench.papers.networks import step
from bench.papers.published import HOME_BATCHES
from bench.papers.row import NONE, Cell, Row
from cswap.errors import BudgetError
from cswap.plan.hardware import load_hardware
from cswap.plan.planner import plan

if TYPE_CHECKING:
    from cswap.plan.hardware import Hardware

MACHINE: Final = "rtx2080ti"
TIME_LIMIT_S: Final = 2.0
PRECISION: Final = 0.02
POLICIES: Final = ("none", "vdnn-all", "capuchin", "home")
BATCH_LIMIT: Final = 1 << 17

WHY: Final = (
    "the networks' widths and depths are not given, and our memory counts live tensors only: no "
    "allocator's blocks, no cuDNN workspaces, no CUDA context"
)

WHY_SPEED: Final = {
    "vdnn-all": "the paper's vDNN stands still for every copy, ours does not",
    "capuchin": "both are judged by our simulator here",
}
"""Reasons by the policy that HOME is compared with."""


def cells(*, quick: bool) -> list[Cell]:
    """The work, a cell per network; quick: none, since each takes a minute."""
    return [] if quick else [Cell(f"home {m}", partial(_rows, m)) for m in HOME_BATCHES]


def largest_batch(model: str, hardware: Hardware, policy: str, start: int) -> int:
    """The largest batch, to `PRECISION`, for which the policy finds a plan; 0 if none."""
    low, high = 0, start
    while high < BATCH_LIMIT and step_s(model, hardware, policy, high) is not None:
        low, high = high, 2 * high
    while high - low > max(1, PRECISION * high):
        middle = (low + high) // 2
        if step_s(model, hardware, policy, middle) is None:
            high = middle
        else:
            low = middle
    return low


def step_s(model: str, hardware: Hardware, policy: str, batch: int) -> float | None:
    """Seconds of a step under the policy, simulated; None if no plan of it fits."""
    trace = step(model, "cifar10", batch, hardware, optimizer="adam")
    try:
        made = plan(
            trace, hardware, policy=policy, time_limit=TIME_LIMIT_S, recompute=True, stoppable=False
        )
    except BudgetError:
        return None
    return made.predicted["step_s"]


def _rows(model: str) -> list[Row]:
    hardware = load_hardware(MACHINE)
    published = HOME_BATCHES[model]
    largest: dict[str, int] = {}
    for policy in POLICIES:
        start = max(published[0] // 2, largest.get("none", 0) // 2, 1)
        largest[policy] = largest_batch(model, hardware, policy, start)
    return [*_batches(model, largest), *_speeds(model, hardware, largest)]


def _batches(model: str, largest: dict[str, int]) -> list[Row]:
    torch_batch, capuchin_batch, home_batch = HOME_BATCHES[model]
    protocol = f"{MACHINE}, 11 GiB, CIFAR-10, Adam; bisected to {PRECISION:.0%}, {TIME_LIMIT_S:g} s"

    def row(quantity: str, what: str, published: float, ours: float, why: str = WHY) -> Row:
        unit = "batch" if quantity == "batch" else "x"
        details = {"kind": quantity, "model": model, "largest": largest}
        return Row(
            "HOME", f"{model}: {what}", unit, published, ours, protocol, why, details=details
        )

    return [
        row("batch", "largest batch of PyTorch", torch_batch, largest["none"]),
        row(
            "over none",
            "HOME's largest batch over PyTorch's",
            home_batch / torch_batch,
            largest["home"] / largest["none"],
            f"{WHY}; recomputation chains of any length are allowed here",
        ),
        row(
            "over capuchin",
            "HOME's largest batch over Capuchin's",
            home_batch / capuchin_batch,
            largest["home"] / max(largest["capuchin"], 1),
        ),
    ]


def _speeds(model: str, hardware: Hardware, largest: dict[str, int]) -> list[Row]:
    # All three must run. vDNN has the least room, because it keeps tensors that no layer reads.
    batch = min(largest[policy] for policy in POLICIES[1:])
    seconds = {policy: step_s(model, hardware, policy, batch) for policy in POLICIES[1:]}
    home_s = seconds["home"]
    return [
        Row(
            "HOME",
            f"{model}, batch {batch}: throughput against {policy}",
            "x",
            None,
            theirs / home_s if theirs and home_s else None,
            f"{MACHINE}, the largest batch at which vDNN, Capuchin and HOME all run",
            WHY_SPEED[policy],
            NONE,
            details={
                "kind": f"speed over {policy}",
                "model": model,
                "seconds": seconds,
                "batch": batch,
            },
        )
        for policy, theirs in seconds.items()
        if policy != "home"
    ]
