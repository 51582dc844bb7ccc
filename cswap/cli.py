"""The command line: parse, call one function, print."""

from __future__ import annotations

import sys
from dataclasses import asdict
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

import typer

import cswap
from cswap import doctor as doctor_module
from cswap.commands import experiments, planning
from cswap.commands.output import AsJson, Form, chosen, emit
from cswap.display import visible
from cswap.errors import ConfigError, CswapError
from cswap.report import terminal
from cswap.report.terminal import Format

if TYPE_CHECKING:
    from rich.progress import TaskID

app = typer.Typer(
    help="Compressed swapping of the tensors that PyTorch's autograd saves for backward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(planning.plan)
app.add_typer(planning.hardware_app, name="hardware")
app.add_typer(experiments.bench_app, name="bench")


def main() -> None:
    """Run the command line; an error of cswap's becomes one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # a terminal may not know every character of a name
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="cswap")
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
def doctor(form: Form = Format.TABLE, as_json: AsJson = False) -> None:
    """Say what cswap can use on this machine, why not, and what to install.

    Exit code 0 if swapping works on the CPU, else 1.
    """
    findings = doctor_module.examine()
    usable = doctor_module.cpu_usable(findings)
    yes, no, missing = (
        terminal.literal(word, style)
        for word, style in (("yes", "green"), ("no", ""), ("NO", "red"))
    )
    marks = [yes if f.usable else missing if f.required else no for f in findings]
    emit(
        chosen(form, as_json),
        ("part", "usable", "version", "what, or why not", "what to do"),
        [
            (f.part, mark, f.version, f.detail, f.remedy)
            for f, mark in zip(findings, marks, strict=True)
        ],
        lambda: {"cpu_usable": usable, "findings": [asdict(f) for f in findings]},
        [f"Swapping on the CPU: {'works' if usable else 'does not work; see NO above'}."],
        drop=("version",),
    )
    raise typer.Exit(0 if usable else 1)


@app.command()
def calibrate(
    device: Annotated[str, typer.Option(help="Kind of device: cpu or cuda.")] = "cpu",
    show: Annotated[bool, typer.Option("--show", help="Measure nothing: show the last.")] = False,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Measure how long each codec takes on this machine, and its link, for the advisor.

    Some seconds, best on an idle machine. Exit code 1 if there is nothing to show.
    """
    from cswap.advisor.calibration import path_of, stored
    from cswap.report import calibration as report

    if not show:
        _check_cache()
        _calibrate(device)
    found = stored(device)
    if found is None or not found.times:
        print("This machine has not been calibrated: run `cswap calibrate`.")
        raise typer.Exit(1)
    emit(
        chosen(form, as_json),
        report.COLUMNS,
        report.rows(found),
        lambda: asdict(found),
        [*report.notes(found), f"Kept in {path_of(found.machine)}"],
        drop=report.DROPPED,
    )


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


def _calibrate(device: str) -> None:
    from rich.progress import Progress

    from cswap.advisor import calibrate as measuring

    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("Measuring", total=measuring.n_steps(device))
        for name in measuring.steps(device):
            progress.update(bar, advance=1, description=f"Measured {name}")


@app.command()
def warm(
    codecs: Annotated[list[str] | None, typer.Argument(help="Which; default: all.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that compile.", min=1)] = 1,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Of the tensors, such as float32; default: all.")
    ] = None,
) -> None:
    """Compile the CPU's kernels now, so that the first training step does not wait for them.

    All codecs take some minutes of one core, once per machine; in a container, while its image is
    built. --jobs shares the work among processes; --dtype float32 compiles less. Kernels for GPUs
    are made by `python -m bench gpu build` of a checkout.
    """
    from rich.progress import Progress

    from cswap import warm as warming

    names = list(codecs) if codecs else warming.names()
    dtypes = warming.dtypes_of(dtype) if dtype else warming.DTYPES
    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("Compiling", total=len(names) + 2)
        for name in warming.steps(names, jobs, dtypes=dtypes):
            progress.update(bar, advance=1, description=f"Compiled {visible(name)}")
    folder = warming.folder()
    print(f"Compiled: {', '.join(names)}. Kept in {folder}." if folder else warming.NOT_KEPT)


@app.command()
def tune(
    codecs: Annotated[list[str], typer.Argument(help="Which, such as zvc int8.")],
    device: Annotated[str, typer.Option(help="Kind of device: cpu or cuda.")] = "cpu",
    samples: Annotated[int, typer.Option(help="Per codec; 10 of them random.", min=1)] = 35,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
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

            results.append(tuner.tune(codec, device, budget=samples, progress=show))
    rows = []
    for r in results:
        times = (r.default_s, r.guided_s, r.seconds)
        shape = ", ".join(f"{name} {value}" for name, value in r.shape.items())
        kept = " (default)" if r.shape == r.default else ""
        rows.append((r.codec, *(f"{1e3 * s:.3f}" for s in times), shape + kept))
    emit(
        chosen(form, as_json),
        ("codec", "default ms", "guided ms", "used ms", "shape"),
        rows,
        lambda: [asdict(result) for result in results],
        drop=("guided ms",),
    )


@app.command()
def explain(
    file: Annotated[str, typer.Argument(help="Written by SwapEngine.save().")],
    position: Annotated[
        int | None, typer.Option(help="Show all candidates of this call site.")
    ] = None,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """Show the choice at every call site, with its reason, its cost and the regret.

    Like call sites of blocks are one row of the table; other formats have a row for each.
    """
    from cswap.report import explain as report

    record = report.load(file)
    columns: tuple[str, ...] = report.COLUMNS
    rows = report.site_rows(record, blocks=form is Format.TABLE)
    if position is not None:
        columns, rows = report.CANDIDATE_COLUMNS, report.candidate_rows(record, position)
    emit(
        chosen(form, as_json),
        columns,
        rows,
        lambda: record,
        [report.summary(record), *report.notes(record)],
        drop=report.DROPPED,
    )


@app.command()
def report(
    file: Annotated[str, typer.Argument(help="Written by SwapEngine.trace().")],
    form: Form = Format.TABLE,
) -> None:
    """Show a recorded step by module: codecs, copies and waits.

    https://ui.perfetto.dev draws the file: bytes over time, and a lane for each of them.
    """
    from cswap.report import timeline

    recording = timeline.load(file)
    emit(
        form,
        timeline.COLUMNS,
        timeline.rows(recording),
        lambda: timeline.record(recording),
        [timeline.summary(recording)],
    )


@app.command()
def codecs(
    names: Annotated[list[str] | None, typer.Argument(help="Which; default: all.")] = None,
    form: Form = Format.TABLE,
    as_json: AsJson = False,
) -> None:
    """List the codecs, what they take and whether they work here."""
    rows = doctor_module.survey_codecs(names or ())
    cells = []
    for row in rows:
        lossless = "" if row.lossless is None else "yes" if row.lossless else "no"
        available = "yes" if row.available else "no"
        takes = (doctor_module.abbreviate(row.cpu), doctor_module.abbreviate(row.cuda))
        cells.append((row.name, lossless, *takes, available, row.description))
    columns = ("codec", "lossless", "takes on CPU", "on CUDA", "usable", "what, or why not")
    emit(
        chosen(form, as_json),
        columns,
        cells,
        lambda: [asdict(row) for row in rows],
        drop=("on CUDA", "takes on CPU"),
    )
