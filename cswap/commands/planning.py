"""`cswap plan` and `cswap hardware`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from cswap.commands.output import AsJson, Form, chosen, emit
from cswap.report.files import check_writable, writing
from cswap.report.terminal import Format

hardware_app = typer.Typer(help="Hardware profiles that plans are made for.", no_args_is_help=True)


def plan(
    trace: Annotated[
        str, typer.Argument(help="Trace of a step (JSON), by cswap.estimate().save().")
    ],
    hardware: Annotated[str, typer.Option(help="Profile, or a file; here: this machine.")],
    budget: Annotated[str, typer.Option(help='Device memory, such as "8GiB"; default: all.')] = "",
    policy: Annotated[str, typer.Option(help="One, several with commas, or all.")] = "joint",
    out: Annotated[str, typer.Option(help="Write the (best) plan to this file.")] = "",
    seed: Annotated[int, typer.Option(help="Of random choices.")] = 0,
    time_limit: Annotated[float | None, typer.Option(help="Seconds per policy.")] = None,
    recompute: Annotated[
        bool, typer.Option(help="Tensors may be computed again, where an engine can.")
    ] = False,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Plan what to keep, swap and recompute in a step, and say what that would give (simulated).

    Ctrl-C ends a search with the best plan so far.
    """
    from rich.progress import Progress

    from cswap.config import parse_bytes
    from cswap.plan.hardware import load_hardware
    from cswap.plan.planner import compare
    from cswap.report import planning

    names = None if policy == "all" else [name.strip() for name in policy.split(",")]
    nbytes = parse_bytes(budget, "budget") if budget else None
    machine = load_hardware(_hardware(hardware))
    if out:
        check_writable("--out", out)
    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("Planning", total=1.0)

        def show(done: float, text: str) -> None:
            progress.update(bar, completed=done, description=text)

        rows = compare(
            trace,
            machine,
            nbytes,
            names,
            seed=seed,
            time_limit=time_limit,
            recompute=recompute,
            progress=show,
        )
    best = planning.best(rows)
    note = planning.UNIFIED_NOTE if machine.unified else ""
    if out:
        with writing("--out", out):
            best.save(out)
    emit(
        chosen(form, as_json),
        planning.COLUMNS,
        map(planning.cells, rows),
        lambda: [planning.record(row) for row in rows],
        ["Simulated." + note + (f" Written: {out} (policy {best.policy})" if out else "")],
        drop=planning.DROPPED,
    )


def _hardware(name: str) -> object:
    if name != "here":
        return name
    from cswap.plan.this_machine import this_machine

    return this_machine()


@hardware_app.command("list")
def list_profiles(form: Form = Format.TABLE, as_json: AsJson = False) -> None:
    """List the hardware profiles that come with cswap."""
    from cswap.plan.hardware import list_hardware, load_hardware
    from cswap.report import planning

    found = [load_hardware(name) for name in list_hardware()]
    rows = map(planning.hardware_cells, found)
    emit(
        chosen(form, as_json),
        planning.HARDWARE_COLUMNS,
        rows,
        lambda: [h.name for h in found],
        [planning.HARDWARE_NOTE],
    )


@hardware_app.command("show")
def show_profile(
    name: Annotated[str, typer.Argument(help="Of a profile, or a file; here: this machine.")],
) -> None:
    """Print a hardware profile, with the source of each figure, as JSON."""
    from cswap.plan.hardware import load_hardware

    print(json.dumps(load_hardware(_hardware(name)).to_dict(), indent=1))  # noqa: T201
