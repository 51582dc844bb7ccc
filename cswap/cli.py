"""The command line: parse, call one function, print."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import cswap
from cswap import doctor as doctor_module
from cswap.display import shown, visible
from cswap.errors import ConfigError, CswapError
from cswap.report import terminal
from cswap.report.files import check_writable, writing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.progress import TaskID

app = typer.Typer(
    help="Compressed swapping of the tensors that PyTorch's autograd saves for backward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

hardware_app = typer.Typer(help="Hardware profiles that plans are made for.", no_args_is_help=True)
app.add_typer(hardware_app, name="hardware")

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """Run the command line; an error of cswap's becomes one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # a terminal may not know every character of a name
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except CswapError as error:
        print(f"cswap: {visible(str(error))}", file=sys.stderr)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"cswap {cswap.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


@app.command()
def doctor(as_json: _Json = False) -> None:
    """Say what cswap can use on this machine, why not, and what to install.

    Exit code 0 if swapping works on the CPU, else 1.
    """
    findings = doctor_module.examine()
    usable = doctor_module.cpu_usable(findings)
    if as_json:
        print(json.dumps({"cpu_usable": usable, "findings": [asdict(f) for f in findings]}))
    else:
        table = terminal.new_table("part", "usable", "version", "what, or why not", "what to do")
        for f in findings:
            mark = "[green]yes[/]" if f.usable else "[red]NO[/]" if f.required else "no"
            cells = map(terminal.literal, (f.version, f.detail, f.remedy))
            table.add_row(f.part, mark, *cells)
        terminal.show(table)
        print(f"Swapping on the CPU: {'works' if usable else 'does not work; see NO above'}.")
    raise typer.Exit(0 if usable else 1)


@app.command()
def calibrate(
    device: Annotated[str, typer.Option(help="Kind of device: cpu or cuda.")] = "cpu",
    show: Annotated[bool, typer.Option("--show", help="Measure nothing: show the last.")] = False,
    again: Annotated[bool, typer.Option(help="Measure what is known already, too.")] = False,
    plot: Annotated[str, typer.Option(help="Draw the fits to this file (.png).")] = "",
    as_json: _Json = False,
) -> None:
    """Measure how long each codec takes on this machine, and its link, for the advisor.

    Some seconds, best on an idle machine; Ctrl-C keeps what is done, the next run goes on. Exit
    code 1 if there is nothing to show, 130 if interrupted.
    """
    from cswap.advisor.calibration import path_of, stored
    from cswap.report import calibration as report

    if not show:
        _check_cache()
    picture = check_writable("--plot", plot) if plot else None
    if not show and not _calibrate(device, again=again):
        print("Interrupted: `cswap calibrate` goes on from here.")
        raise typer.Exit(130)
    found = stored(device)
    if found is None:
        print("This machine has not been calibrated: run `cswap calibrate`.")
        raise typer.Exit(1)
    if picture:
        with writing("--plot", plot):
            picture.write_bytes(report.picture(found))
    if as_json:
        print(json.dumps(asdict(found)))
        return
    _print(report.COLUMNS, report.rows(found))
    terminal.say(*report.notes(found), f"Kept in {path_of(found.machine)}")


def _check_cache() -> None:
    from cswap import cache_folder
    from cswap.advisor.calibration import folder

    try:
        cache_folder.make(folder())
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"{folder()}: cannot be written ({why}). {cache_folder.REMEDY}"
        ) from error


def _calibrate(device: str, *, again: bool) -> bool:
    from rich.progress import Progress

    from cswap.advisor import calibrate as measuring

    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("Measuring", total=measuring.n_steps())
        try:
            for name in measuring.steps(device, again=again):
                progress.update(bar, advance=1, description=f"Measured {name}")
        except KeyboardInterrupt:
            return False
    return True


@app.command()
def tune(
    codecs: Annotated[list[str], typer.Argument(help="Which, such as zvc int8.")],
    device: Annotated[str, typer.Option(help="Kind of device: cpu or cuda.")] = "cpu",
    samples: Annotated[int, typer.Option(help="Per codec; 10 of them random.", min=1)] = 35,
    as_json: _Json = False,
) -> None:
    """Find launch shapes of codecs by Bayesian optimisation, and keep them for this machine."""
    from rich.markup import escape
    from rich.progress import Progress

    from cswap.advisor import tuner

    _check_cache()
    results = []
    with Progress(disable=not sys.stdout.isatty()) as progress:
        for codec in codecs:
            bar = progress.add_task(escape(visible(codec)), total=samples)

            def show(n: int, bar: TaskID = bar) -> None:
                progress.update(bar, completed=n)

            results.append(tuner.tune(codec, device, budget=samples, baseline=True, progress=show))
    if as_json:
        print(json.dumps([asdict(result) for result in results]))
        return
    rows = []
    for r in results:
        times = (r.default_s, r.random_s or 0.0, r.guided_s, r.seconds)
        shape = ", ".join(f"{name} {value}" for name, value in r.shape.items())
        kept = " (default)" if r.shape == r.default else ""
        rows.append((r.codec, *(f"{1e3 * s:.3f}" for s in times), shape + kept))
    _print(("codec", "default ms", "random ms", "guided ms", "used ms", "shape"), rows)


@app.command()
def explain(
    file: Annotated[str, typer.Argument(help="Written by SwapEngine.save().")],
    position: Annotated[
        int | None, typer.Option(help="Show all candidates of this call site.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Say for every call site what was chosen, why, what it cost, and the regret."""
    from cswap.report import explain as report

    record = report.load(file)
    if as_json:
        print(json.dumps(record))
        return
    if position is None:
        _print(report.COLUMNS, report.site_rows(record))
    else:
        _print(report.CANDIDATE_COLUMNS, report.candidate_rows(record, position))
    terminal.say(report.summary(record), *report.notes(record))


@app.command()
def report(
    file: Annotated[str, typer.Argument(help="Written by SwapEngine.trace().")],
    out: Annotated[
        str, typer.Option(help="Picture (.png) or page (.html); default: FILE with .html.")
    ] = "",
) -> None:
    """Show a recorded step: bytes over time, codecs, copies, waits, and a table by module."""
    from cswap.report import timeline

    events = timeline.load(file)
    target = out or str(Path(file).with_suffix(".html"))
    path = check_writable("--out", target)
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"--out {shown(target)}: must end in .png or .html.")
    if path.suffix == ".png":
        made = timeline.picture(events)
    else:
        made = timeline.page(events, Path(file).name).encode()
    with writing("--out", target):
        path.write_bytes(made)
    _print(timeline.COLUMNS, timeline.rows(events))
    terminal.say(timeline.summary(events), f"Written: {target}")


@app.command()
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
    recompute: Annotated[bool, typer.Option(help="Tensors may be computed again.")] = True,
    as_json: _Json = False,
) -> None:
    """Plan what to keep, swap and recompute in a step, and say what that would give (simulated).

    Ctrl-C ends a search with the best plan so far.
    """
    from rich.progress import Progress

    from cswap.config import parse_bytes
    from cswap.plan.planner import available, compare
    from cswap.report import planning

    names = available() if policy == "all" else [name.strip() for name in policy.split(",")]
    nbytes = parse_bytes(budget, "budget") if budget else None
    if out:
        check_writable("--out", out)
    quiet = not sys.stdout.isatty()
    with _libraries_to_stderr(quiet), Progress(disable=quiet) as progress:
        bar = progress.add_task("Planning", total=1.0)

        def show(done: float, text: str) -> None:
            progress.update(bar, completed=done, description=text)

        rows = compare(
            trace,
            _hardware(hardware),
            nbytes,
            names,
            seed=seed,
            time_limit=time_limit,
            recompute=recompute,
            progress=show,
        )
    best = planning.best(rows)
    if out:
        with writing("--out", out):
            best.save(out)
    if as_json:
        print(json.dumps([planning.record(row) for row in rows]))
        return
    _print(planning.COLUMNS, map(planning.cells, rows))
    terminal.say("Simulated." + (f" Written: {out} (policy {best.policy})" if out else ""))


@contextmanager
def _libraries_to_stderr(wanted: bool) -> Iterator[None]:
    # HiGHS prints a line of its own now and then, in C: it must not end up in somebody's JSON.
    if not wanted:
        yield
        return
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(out, 1)
        os.close(out)


def _hardware(name: str) -> object:
    if name != "here":
        return name
    from cswap.plan.this_machine import this_machine

    return this_machine()


@hardware_app.command("list")
def list_profiles(as_json: _Json = False) -> None:
    """List the hardware profiles that come with cswap."""
    from cswap.plan.hardware import list_hardware, load_hardware
    from cswap.report import planning

    found = [load_hardware(name) for name in list_hardware()]
    if as_json:
        print(json.dumps([h.name for h in found]))
        return
    _print(planning.HARDWARE_COLUMNS, map(planning.hardware_cells, found))


@hardware_app.command("show")
def show_profile(
    name: Annotated[str, typer.Argument(help="Of a profile, or a file; here: this machine.")],
) -> None:
    """Print a hardware profile, with the source of each figure, as JSON."""
    from cswap.plan.hardware import load_hardware

    print(json.dumps(load_hardware(_hardware(name)).to_dict(), indent=1))


@app.command()
def codecs(
    names: Annotated[list[str] | None, typer.Argument(help="Which; default: all.")] = None,
    as_json: _Json = False,
) -> None:
    """List the codecs, what they take and whether they work here."""
    rows = doctor_module.survey_codecs(names or ())
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    cells = []
    for row in rows:
        lossless = "" if row.lossless is None else "yes" if row.lossless else "no"
        available = "yes" if row.available else "no"
        takes = (doctor_module.abbreviate(row.cpu), doctor_module.abbreviate(row.cuda))
        cells.append((row.name, lossless, *takes, available, row.description))
    columns = ("codec", "lossless", "takes on CPU", "on CUDA", "usable", "what, or why not")
    _print(columns, cells)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def bench(context: typer.Context) -> None:
    """Run a demo or a benchmark: `python -m bench`, from anywhere. Needs a checkout.

    Files that benchmarks write are relative to the current directory.
    """
    root = Path(cswap.__file__).resolve().parents[1]
    if not all((root / file).is_file() for file in ("bench/__main__.py", "pyproject.toml")):
        raise ConfigError(
            f"bench: benchmarks come with the repository, not with the package in "
            f"{shown(str(root))}. In a checkout, run `python -m bench`, or `pip install -e .` "
            "first."
        )
    sys.path.insert(0, str(root))
    sys.argv = ["bench", *context.args]  # what results say they were made by
    importlib.import_module("bench.__main__").app(context.args, prog_name="cswap bench")


def _print(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = terminal.new_table(*columns)
    terminal.add_rows(table, rows)
    terminal.show(table)
