"""tvDNN's claim: VGG-16 at batch 256 and 512 in a few GB without significant slowdown."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from bench.papers.cudnn import as_cudnn
from bench.papers.free_moves import FreeMoves
from bench.papers.row import CLAIM, Cell, Row
from bench.papers.sectioned import by_sections
from bench.workloads.zoo.catalogue import build, example, loss
from cswap.errors import BudgetError
from cswap.log import log
from cswap.plan.estimate import LAUNCH_S, estimate
from cswap.plan.hardware import load_hardware
from cswap.plan.planner import plan
from cswap.plan.simulate import smallest_feasible_budget
from cswap.plan.simulator.lifetimes import live_bytes

if TYPE_CHECKING:
    from bench.papers.free_moves import Moves
    from cswap.plan.hardware import Hardware
    from cswap.schema.trace import Trace

MACHINE: Final = "titan-x-maxwell"
GIB: Final = 1 << 30
ROOM: Final = 1.1
"""Budget over the smallest in which the cut step runs: gradients do not leave in our simulator,
and those of a whole feature map are alive between two layers."""

SMALL_BYTES: Final = 4 * 10**9
"""The paper's 4 GB."""

AHEAD: Final = (4, 16, 64, 256)
"""Leads of copies back, in operators. Each is tried; the fastest step counts."""

SMALL_SECTIONS: Final = 64
"""Sections of the batch, in `SMALL_BYTES`."""

SECTIONS: Final = {256: 16, 512: 32}
POLICIES: Final = ("tvdnn-heuristic", "tvdnn-ilp")
TIME_LIMIT_S: Final = 20.0


def cells(*, quick: bool) -> list[Cell]:
    """The work, a cell per batch; quick: none."""
    return [] if quick else [Cell(f"tvdnn {b}", partial(_rows, b)) for b in SECTIONS]


def _rows(batch: int) -> list[Row]:
    inputs, target = example("vgg16", batch)
    trace = as_cudnn(estimate(build("vgg16"), inputs, loss, target, hardware=MACHINE, name="vgg16"))
    cut = by_sections(trace, SECTIONS[batch], LAUNCH_S)
    hardware = load_hardware(MACHINE)
    floors = [smallest_feasible_budget(t, hardware) / GIB for t in (trace, cut)]
    details = {
        "needed_gib": max(live_bytes(trace)) / GIB,
        "smallest_budget_gib": floors[0],
        "smallest_budget_in_sections_gib": floors[1],
    }
    budget = int(ROOM * floors[1] * GIB)
    rows = [_row(policy, batch, cut, budget, details) for policy in POLICIES]
    return [*rows, _free_moves(batch, trace)]


def _free_moves(batch: int, trace: Trace) -> Row:
    cut = by_sections(trace, SMALL_SECTIONS, LAUNCH_S)
    hardware = load_hardware(MACHINE)
    tried = (_moves(cut, hardware, ahead) for ahead in AHEAD)
    found = [moves for moves in tried if moves is not None]
    best = min(found, key=lambda moves: moves.step_s, default=None)
    moved = {} if best is None else {
        "out_gib": best.out_bytes / GIB,
        "in_gib": best.in_bytes / GIB,
        "gradients_out_gib": best.gradient_bytes / GIB,
    }  # fmt: skip
    return Row(
        "tvDNN",
        f"VGG-16, batch {batch} in 4 GB: slowdown, gradients move between sections, too",
        "%",
        None,
        None if best is None else 100 * (best.step_s / best.compute_s - 1),
        f"{MACHINE}, {SMALL_SECTIONS} sections of the batch; any tensor of the step may move, "
        "parameters stay; a schedule in tvDNN's style, not its own",
        "the paper's machine and figures were not available, only its abstract: 'without "
        "significant slowdown'"
        + ("" if found else "; with no lead of the copies does the step fit"),
        CLAIM,
        details=moved,
    )


def _moves(cut: Trace, hardware: Hardware, ahead: int) -> Moves | None:
    try:
        return FreeMoves(cut, hardware, SMALL_BYTES, ahead).run()
    except BudgetError as error:
        log.debug("tvDNN, %d operators ahead: %s", ahead, error)
        return None


def _row(policy: str, batch: int, trace: Trace, budget: int, details: dict[str, float]) -> Row:
    hardware = replace(load_hardware(MACHINE), memory_bytes=max(budget, 12 * GIB))
    ours, why = (
        None,
        (
            "the paper's machine and figures were not available, only its abstract: 'without "
            "significant slowdown'; our policies are tvDNN-style. Less memory needs gradients that "
            "leave, too, which `cswap.plan.simulate` does not have"
        ),
    )
    try:
        made = plan(trace, hardware, budget, policy, time_limit=TIME_LIMIT_S, stoppable=False)
        ours = 100 * (made.predicted["step_s"] / made.predicted["compute_s"] - 1)
    except BudgetError as error:
        why = f"no plan of this policy fits: {error}"
    return Row(
        "tvDNN",
        f"VGG-16, batch {batch} in {budget / GIB:.1f} GiB: slowdown, policy {policy}",
        "%",
        None,
        ours,
        f"{MACHINE}, {SECTIONS[batch]} sections of the batch, operators cut likewise; "
        f"{details['needed_gib']:.0f} GiB without swapping",
        why,
        CLAIM,
        details=dict(details),
    )
