"""The measured values on disk: one row per saved tensor, its numbers by checkpoint."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cswap.codecs.registry import get_codec
from cswap.errors import TraceError
from cswap.experiments.files.writing import write_text
from cswap.plan.tensor_values import Values, with_values
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.schema.trace import Trace

FILE: Final = Path(__file__).resolve().parents[1] / "results" / "cpu" / "sparsity.json"

_PROFILE: Final = (
    *("zero_fraction", "spread_1", "spread_3", "spread_7", "spread_15", "int_bits"),
    *("spread_nonzero_1", "spread_nonzero_3", "spread_nonzero_7", "spread_nonzero_15"),
)
"""Stored fields of a profile: zeros, and the spread of exponents."""


def packed(checkpoints: Sequence[Sequence[Values]]) -> list[dict[str, Any]]:
    """Rows of JSON of a run's checkpoints, which have the same tensors; four digits are kept."""
    rows = []
    for same in zip(*checkpoints, strict=True):
        first = same[0]
        rows.append(
            {
                "name": first.name,
                "signature": first.signature,
                "sample_shape": list(first.sample_shape),
                "elements": math.prod(first.sample_shape),
                "profile": {
                    k: [_short(v.profile[k]) for v in same] for k in _PROFILE if k in first.profile
                },
                "ratios": {k: [_short(v.ratios[k]) for v in same] for k in first.ratios},
            }
        )
    return rows


def save(path: Path, document: dict[str, Any]) -> None:
    """Write the document whole or not at all; a line per tensor, there are thousands of numbers."""
    rows: list[str] = []

    def stub(run: dict[str, Any]) -> dict[str, Any]:
        first = len(rows)
        rows.extend(json.dumps(row, allow_nan=False) for row in run["tensors"])
        return {**run, "tensors": [f"@{i}" for i in range(first, len(rows))]}

    runs = {key: stub(run) for key, run in document["runs"].items()}
    text = json.dumps({**document, "runs": runs}, indent=1, allow_nan=False)
    text = re.sub(r'"@(\d+)"', lambda found: rows[int(found[1])], text)
    write_text(path, text)


def unpacked(run: dict[str, Any], checkpoint: int) -> tuple[Values, ...]:
    """The values of one checkpoint of a run."""
    return tuple(
        Values(
            row["name"],
            row["signature"],
            tuple(row["sample_shape"]),
            {k: v[checkpoint] for k, v in row["profile"].items()},
            {k: v[checkpoint] for k, v in row["ratios"].items()},
        )
        for row in run["tensors"]
    )


def n_checkpoints(model: str, activation: str, file: Path = FILE) -> int:
    """Number of checkpoints of a run."""
    return len(_run(model, activation, file)["at_steps"])


def as_measured(
    trace: Trace,
    model: str,
    activation: str = "relu",
    checkpoint: int = -1,
    *,
    file: Path = FILE,
) -> Trace:
    """The trace with the values that the committed runs measured.

    Args:
        trace: a trace of that model, with any batch and image size.
        model: model of the runs.
        activation: ``relu`` or ``leaky``; GPT-2's is ``own``.
        checkpoint: which; default: the last.
        file: a file of `python -m bench sparsity`.

    Raises:
        TraceError: there is no such run.
    """
    run = _run(model, activation, file)
    names = {name for row in run["tensors"] for name in row["ratios"]}
    codecs = {name for name in names if get_codec(name).lossless}  # no plan loses anything here
    return with_values(trace, unpacked(run, checkpoint), codecs=codecs)


def has_run(model: str, activation: str = "relu", file: Path = FILE) -> bool:
    """Whether that run was made."""
    return f"{model} {activation}" in _document(file)["runs"]


def _run(model: str, activation: str, file: Path) -> dict[str, Any]:
    runs: dict[str, dict[str, Any]] = _document(file)["runs"]
    key = f"{model} {activation}"
    if key not in runs:
        raise TraceError(
            f"model={model!r}, activation={activation!r}: not measured. Known: {', '.join(runs)}; "
            "`python -m bench sparsity` measures."
        )
    return runs[key]


@cache
def _document(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {"runs": {}}
    document = read_object(file, "file", TraceError)
    if not isinstance(document.get("runs"), dict):
        raise TraceError(
            f"file={str(file)!r}: has no runs; `python -m bench sparsity` writes some."
        )
    return document


def _short(value: float) -> float:
    return float(f"{value:.4g}")
