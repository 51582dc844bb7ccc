"""`python -m bench papers`: the papers' figures beside ours, simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress

from bench.papers import cswap, cswap_means, home, home_means, time_model, vdnn
from bench.papers.report import draw, table
from cswap.experiments.files.environment import environment
from cswap.experiments.files.resumable import stored
from cswap.experiments.files.writing import write
from cswap.experiments.options import names, writable_file
from cswap.report import terminal
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Collection

VERSION: Final = 2
DEFAULT_OUT: Final = Path("bench/results/cpu/papers.json")
SYSTEMS: Final = {
    "vdnn": vdnn.cells,
    "cswap": cswap.cells,
    "decisions": time_model.cells,
    "home": home.cells,
}


def main(
    out: Annotated[
        Path, typer.Option(help="Result file (JSON), whose cells stay; the picture is beside it.")
    ] = DEFAULT_OUT,
    systems: Annotated[str, typer.Option(help=f"Some of {', '.join(SYSTEMS)}.")] = ",".join(
        SYSTEMS
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="A few cells, made anew, as a test.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Make the cells anew that the file has, too.")
    ] = False,
) -> None:
    """Simulate the papers' measurements, and say why the figures differ."""
    chosen = names("--systems", systems, tuple(SYSTEMS))
    writable_file(out)
    where = environment()
    document = _started(out, where)
    cells = [cell for name in chosen for cell in SYSTEMS[name](quick=quick)]
    if again or quick:  # only these: all others stay, in their order
        kept = _without(document["cells"], {cell.key for cell in cells})
        if again and not quick:  # nor what earlier code made for these systems
            kept = {key: rows for key, rows in kept.items() if key.split()[0] not in chosen}
        document["cells"] = kept
    with Progress() as progress:
        bar = progress.add_task("Simulating", total=len(cells))
        for cell in cells:
            progress.update(bar, description=cell.key)
            if cell.key not in document["cells"]:
                document["environment"] = where  # of the last run that added something
                made = {cell.key: [row.to_dict() for row in cell.run()]}
                document["cells"] = _in_order({**document["cells"], **made})
                write(out, document)
            progress.advance(bar)
    rows = rows_of(document)
    document["means"] = [*cswap_means.means(rows), *home_means.means(rows)]
    write(out, document)
    draw(rows_of(document), out.with_suffix(".png"))
    console = Console()
    terminal.show(table([*rows_of(document), *document["means"]]), console=console)
    console.print(literal(f"Written: {out}, {out.with_suffix('.png')}"))


def rows_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows of a result file, in order."""
    return [row for rows in document["cells"].values() for row in rows]


def _without(cells: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: rows for key, rows in cells.items() if key not in keys}


def _in_order(cells: dict[str, Any]) -> dict[str, Any]:
    # The order of a whole run, whichever cells were made last: the table's rows follow it.
    order = [cell.key for make in SYSTEMS.values() for cell in make(quick=False)]
    known = {key: cells[key] for key in order if key in cells}
    return known | _without(cells, known.keys())


def _started(out: Path, where: dict[str, object]) -> dict[str, Any]:
    new = {"version": VERSION, "environment": where, "cells": {}, "means": []}
    found = {"kind": "papers", **(stored(out, {"cells": dict}, version=VERSION) or new)}
    kept = {key: rows for key, rows in found["cells"].items() if key.split()[0] in SYSTEMS}
    return {**found, "cells": kept}
