"""Tables of the committed results of the twin; all their figures are simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.pages.committed import as_markdown
from bench.twin import report
from bench.twin.profiles import PROFILES
from cswap.experiments.files.environment import ROOT
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER: Final = ROOT / "bench" / "results" / "twin"

MORE_MODELS: Final = "h200-more-models"
"""File of the models that the first profile's own file has not."""


def validation_table() -> str:
    """The twin against the measured rows."""
    data = read_object(FOLDER / "validation.json", "file")
    table = as_markdown(report.RESIDUAL_HEADINGS, report.residual_cells(data))
    return f"{table}\n\n{_where(data, 'validation.json')}"


def policies_table() -> str:
    """Plans of policies, predicted and followed."""
    data = read_object(FOLDER / "policies.json", "file")
    table = as_markdown(report.POLICY_HEADINGS, report.policy_cells(data))
    return f"{table}\n\n{_where(data, 'policies.json')}"


def largest_table() -> str:
    """The largest batch, by model and machine."""
    data = read_object(FOLDER / "largest.json", "file")
    table = as_markdown(report.LARGEST_HEADINGS, report.largest_cells(data))
    return f"{table}\n\n{_where(data, 'largest.json')}"


def steps_tables() -> str:
    """Steps of models, by machine and method."""
    return "\n\n".join(_steps())


def _steps() -> Iterator[str]:
    first, *others = PROFILES
    for name in (first, MORE_MODELS, *others):
        path = FOLDER / f"{name}.json"
        if not path.exists():
            continue
        data = read_object(path, "file")
        table = as_markdown(report.HEADINGS, report.cells(data))
        profile = data["settings"]["profile"]
        yield f"**{profile}, simulated**\n\n{table}\n\n{_where(data, path.name)}"


def _where(data: dict[str, Any], file: str) -> str:
    command = data["environment"]["command"]
    return f"Simulated by `{command}`; file: `bench/results/twin/{file}`."
