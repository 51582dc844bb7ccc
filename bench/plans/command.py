"""`python -m bench plans`: every policy on models, machines and budgets, simulated."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.sparsity.stored import as_measured, has_run
from bench.workloads.zoo.catalogue import build, example, loss
from cswap.experiments.files.resumable import Partial
from cswap.experiments.options import Again, writable_file
from cswap.plan.estimate import estimate
from cswap.plan.hardware import load_hardware
from cswap.plan.planner import available, compare
from cswap.plan.policy_tools.layerwise import layerwise
from cswap.plan.simulate import Simulator, smallest_feasible_budget
from cswap.plan.simulator.lifetimes import live_bytes
from cswap.report import terminal
from cswap.report.terminal import literal
from cswap.schema.executable import obstacles

if TYPE_CHECKING:
    from cswap.plan.hardware import Hardware
    from cswap.plan.planner import Row
    from cswap.schema.trace import Trace

MODELS: Final = (("vgg16", 128), ("resnet50", 128), ("gpt2", 16))
GPUS: Final = ("v100-pcie3", "a100-pcie4", "h200-pcie5")
SHARES: Final = (0.75, 0.5, 0.25, 0.1)
"""Budgets, as shares of the way from the smallest feasible budget to the unswapped peak."""

RECOMPUTING: Final = ("capuchin", "home", "joint")
"""Policies that may recompute single tensors. The columns with their names alone do not, so that an
engine can follow the plans."""

DEFAULT_OUT: Final = Path("bench/results/cpu/plans.json")


def main(
    time_limit: Annotated[float, typer.Option(help="Seconds per policy.")] = 5.0,
    out: Annotated[Path, typer.Option(help="Result file (JSON).")] = DEFAULT_OUT,
    quick: Annotated[bool, typer.Option("--quick", help="One model, one machine.")] = False,
    again: Again = False,
) -> None:
    """Compare all policies by simulation: step time of the ideal over the plan's.

    An interrupted run goes on when the same command is repeated.
    """
    writable_file(out)
    policies = [name for name in available() if name not in ("none", "oracle")]
    columns = [
        *policies,
        *(f"{name}, recompute" for name in RECOMPUTING),
        *(f"{name}, barriers" for name in policies if name.startswith("vdnn")),
    ]
    settings = {"policies": policies, "time_limit_s": time_limit, "quick": quick}
    partial = Partial(out, kind="plans", version=2, settings=settings, again=again)
    cells: list[dict[str, Any]] = []
    models, gpus = (MODELS[:1], GPUS[:1]) if quick else (MODELS, GPUS)
    with Progress() as progress:
        bar = progress.add_task("Planning", total=len(models) * len(gpus))
        for model, batch in models:
            for gpu in gpus:
                progress.update(bar, description=f"{model} on {gpu}")
                make = functools.partial(_cells, model, batch, gpu, policies, time_limit)
                cells += partial.part(f"{model} on {gpu}", make)
                progress.advance(bar)
    partial.finish(policies=columns, cells=cells, time_limit_s=time_limit)
    console = Console()
    terminal.show(_table(columns, cells), console=console)
    console.print(literal(f"Written: {out}"))


def _cells(
    model: str, batch: int, gpu: str, policies: list[str], time_limit: float
) -> list[dict[str, Any]]:
    hardware = load_hardware(gpu)
    x, target = example(model, batch)
    with torch.device("meta"):
        net = build(model)
    trace = estimate(net, x, loss, target, hardware=hardware, name=model)
    activation = "own" if model == "gpt2" else "relu"
    # Without values every codec would be planned as raw; lossless ones only: nothing is to be lost.
    if measured := has_run(model, activation):
        trace = as_measured(trace, model, activation)
    full, floor = max(live_bytes(trace)), smallest_feasible_budget(trace, hardware)
    found = []
    for share in SHARES:
        budget = int(floor + share * (full - floor))
        run = functools.partial(compare, trace, hardware, budget, stoppable=False)
        rows = run(policies, time_limit=time_limit)
        again = run(RECOMPUTING, time_limit=time_limit, recompute=True)
        rows += [replace(row, policy=f"{row.policy}, recompute") for row in again]
        of_ideal = {r.policy: 1 / r.slowdown if r.plan else None for r in rows}
        barriers = [r for r in rows if r.policy.startswith("vdnn")]
        of_ideal |= {f"{r.policy}, barriers": _with_barriers(trace, hardware, r) for r in barriers}
        found.append(
            {
                "model": model,
                "batch": batch,
                "hardware": gpu,
                "share": share,
                "budget_bytes": budget,
                "unswapped_bytes": full,
                "smallest_bytes": floor,
                "simulated": True,
                "ratios": "bench/results/cpu/sparsity.json" if measured else None,
                "of_ideal": of_ideal,
                "simulated_only": [r.policy for r in rows if r.plan and obstacles(r.plan)],
                "peak_bytes": {r.policy: r.simulation.peak_bytes for r in rows if r.simulation},
                "planning_s": {r.policy: r.planning_s for r in rows},
            }
        )
    return found


def _with_barriers(trace: Trace, hardware: Hardware, row: Row) -> float | None:
    """The share of the ideal if the end of each layer waits for its copies, as in vDNN's paper."""
    if row.plan is None:
        return None
    simulator = Simulator(trace, hardware)
    action, codec, _ = simulator.from_plan(row.plan)
    found = layerwise(simulator, action, codec)
    return found.compute_s / found.step_s


def _table(policies: list[str], cells: list[dict[str, Any]]) -> Table:
    table = Table(title="Ideal step time over the plan's (simulated)")
    for column in ("model", "machine", "budget GiB", *policies):
        table.add_column(column)
    for cell in cells:
        shares = (cell["of_ideal"][policy] for policy in policies)
        table.add_row(
            cell["model"],
            cell["hardware"],
            f"{cell['budget_bytes'] / 2**30:.2f}",
            *("-" if share is None else f"{share:.1%}" for share in shares),
        )
    return table
