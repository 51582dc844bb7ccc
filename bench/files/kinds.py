"""Kinds of result files: the place of their rows, the rows' keys and figures.

`compare`, `report` and the test of the committed files all go by this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cswap.display import short, shown
from cswap.experiments.files.reading import ResultFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from cswap.experiments.files.reading import Document

Fields = dict[str, Any]


def _plain(document: Document) -> Iterator[Fields]:
    yield from document["rows"]


def _overhead(document: Document) -> Iterator[Fields]:
    for name, us in document["microseconds"].items():
        yield {"hooks": "cswap", "tensor": name, "us": us}
    yield from document.get("rows", ())


def _accuracy(document: Document) -> Iterator[Fields]:
    yield from document.get("summary", ())


def _advisor(document: Document) -> Iterator[Fields]:
    yield from document["cells"]
    for model, found in document["training"].items():
        for codec, row in found.items():
            yield {"model": model, "machine": "training", "mode": codec, **row}


def _plans(document: Document) -> Iterator[Fields]:
    for cell in document["cells"]:
        for policy, share in cell["of_ideal"].items():
            times = cell["planning_s"].get(policy)
            yield {**cell, "policy": policy, "of_ideal": share, "planning_s": times}


def _papers(document: Document) -> Iterator[Fields]:
    # CSwap+'s networks have the same words for both machines.
    for rows in (*document["cells"].values(), document["means"]):
        for row in rows:
            yield {**row, "gpu": row["details"].get("gpu")}


def _sparsity(document: Document) -> Iterator[Fields]:
    yield from document["runs"].values()


@dataclass(frozen=True, slots=True)
class Kind:
    """One command's result files.

    Attributes:
        name: the command; parts of `gpu` have names of their own.
        key: fields that name a row; fields that are missing or None are left out.
        figures: names of the figures that are compared; see `figure`.
        rows: returns the rows of a document.
    """

    name: str
    key: tuple[str, ...]
    figures: tuple[str, ...]
    rows: Callable[[Document], Iterator[Fields]] = _plain


KINDS: Final = (
    Kind(
        "codecs",
        ("family", "data", "dtype", "nbytes", "zeros", "codec"),
        ("encode", "decode", "ratio"),
    ),
    Kind("swap", ("model", "method"), ("step", "time_of_off", "peak_saved_bytes", "ratio")),
    Kind("workloads", ("workload", "way"), ("time_of_plain", "held_bytes", "peak_bytes")),
    Kind("alone", ("model", "way"), ("step", "time_of_off", "pages", "growth_bytes")),
    Kind("inlined", ("model", "way"), ("time_of_plain", "saved_bytes")),
    Kind(
        "fit",
        ("model", "share", "method"),
        ("time_of_off", "added_of_checkpoint", "peak_bytes"),
    ),
    Kind("overhead", ("hooks", "tensor"), ("us",), _overhead),
    Kind("accuracy", ("model", "policy"), ("validation_loss", "held_bytes"), _accuracy),
    Kind("accuracy pilot", ("model",), ("validation_loss", "margin")),
    Kind("accuracy schedule", ("schedule",), ("validation_loss", "encoded_bytes_per_step")),
    Kind("demo", ("model", "mode"), ("step_ms", "step_time_rel", "peak_saved_bytes", "ratio")),
    Kind(
        "advisor",
        ("model", "machine", "mode"),
        ("advisor_s", "oracle_s", "cost_s", "step_ms"),
        _advisor,
    ),
    Kind(
        "plans",
        ("model", "batch", "hardware", "share", "policy"),
        ("of_ideal", "planning_s"),
        _plans,
    ),
    Kind("sparsity", ("model", "activation"), ("losses", "seconds"), _sparsity),
    Kind("papers", ("system", "what", "gpu"), ("ours",), _papers),
    Kind(
        "gpu codecs",
        ("data", "dtype", "nbytes", "codec", "threads", "blocks_per_sm"),
        ("encode", "decode", "ratio"),
    ),
    Kind("gpu link", ("way", "blocks", "nbytes"), ("gb_per_s",)),
    Kind("gpu swap", ("data", "dtype", "nbytes", "way"), ("out", "back", "ratio")),
    Kind("gpu training", ("model", "batch", "method"), ("step", "peak_allocated_bytes")),
    Kind(
        "gpu static",
        ("codec", "dtype", "direction", "architecture"),
        ("instructions", "registers"),
    ),
    Kind("gpu build", ("architectures",), ("build_s", "nbytes")),
    Kind("twin", ("profile", "model", "method"), ("step_s", "peak_bytes")),
    Kind("twin policies", ("model", "policy"), ("done step_s", "done peak_bytes")),
    Kind("twin validation", ("row", "figure"), ("error",)),
)


def kind_of(document: Document, path: Path) -> Kind:
    """The kind of a document, by its field ``kind``.

    Raises:
        ResultFileError: the kind is unknown.
    """
    named = document.get("kind")
    for kind in KINDS:
        if kind.name == named:
            return kind
    known = ", ".join(kind.name for kind in KINDS)
    its = shown(named) if named else "it names none"
    raise ResultFileError(f"{path}: of no known kind ({its}); known: {known}.")


def rows_of(kind: Kind, document: Document) -> dict[tuple[str, ...], Fields]:
    """The rows of a document by their keys.

    Raises:
        ResultFileError: rows are missing, or two have the same key.
    """
    found: dict[tuple[str, ...], Fields] = {}
    try:
        for row in kind.rows(document):
            key = tuple(str(row[k]) for k in kind.key if row.get(k) is not None)
            if key in found:
                raise ResultFileError(f"a {kind.name} file: two rows of {short(', '.join(key))}.")
            found[key] = row
    except (KeyError, TypeError, AttributeError) as error:
        version = shown(document.get("version"))
        raise ResultFileError(
            f"a {kind.name} file of version {version}: lacks {short(str(error))}. "
            f"Measure again: `python -m bench {kind.name}`."
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its spread, if that is known.

    Attributes:
        value: usually a median.
        low: lower end of the spread.
        high: upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None


def figure(row: Mapping[str, Any], name: str) -> Figure | None:
    """A figure of a row; None if it is not there, as after a run that diverged.

    Args:
        row: its value is a number with its spread in another field, or a timing; of a list it is
            the last one.
        name: of the field, after those of the objects that it is in.

    >>> figure({"step": {"median_s": 2.0, "low_s": 1.0, "high_s": 3.0}}, "step")
    Figure(value=2.0, low=1.0, high=3.0)
    >>> figure({"done": {"error": 0.5, "error_spread": [0.4, 0.6]}}, "done error")
    Figure(value=0.5, low=0.4, high=0.6)
    """
    first, _, rest = name.partition(" ")
    value = row.get(first)
    if rest:
        return figure(value, rest) if isinstance(value, dict) else None
    if isinstance(value, dict):
        value, low, high = (value.get(f"{end}_s") for end in ("median", "low", "high"))
    elif isinstance(spread := row.get(f"{name}_spread") or row.get(f"{name}_quartiles"), list):
        low, high = spread
    else:
        low, high = row.get(f"low_{name}"), row.get(f"high_{name}")
    found = _number(value[-1] if isinstance(value, list) and value else value)
    return None if found is None else Figure(found, _number(low), _number(high))


def _number(value: Any) -> float | None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_one else None
