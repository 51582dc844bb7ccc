"""Kinds of result files: the place of their rows, the rows' keys and measures.

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


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a row.

    Attributes:
        name: for tables.
        path: keys that lead to it; a figure of None, or without one of the keys, is not there.
        low: where its lower spread is, if the file has it.
        high: likewise.
        more_is_better: for rates and ratios; of seconds and bytes, less is.
        timed: depends on how busy the machine was, as peaks of bytes that wait to be encoded do,
            too; else equal inputs give equal figures.
    """

    name: str
    path: tuple[str | int, ...]
    low: tuple[str | int, ...] | None = None
    high: tuple[str | int, ...] | None = None
    more_is_better: bool = False
    timed: bool = True


@dataclass(frozen=True, slots=True)
class Kind:
    """One command's result files.

    Attributes:
        name: the command; parts of `gpu` have names of their own.
        rows: returns the rows of a document.
        key: fields that name a row; fields that are missing or None are left out.
        measures: the figures that are compared.
    """

    name: str
    rows: Callable[[Document], Iterator[Fields]]
    key: tuple[str, ...]
    measures: tuple[Measure, ...]


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


def at(row: Mapping[str, Any], path: tuple[str | int, ...] | None) -> float | None:
    """The number at a path in a row; None where there is none."""
    if path is None:
        return None
    value: Any = row
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):  # noqa: PERF203 - a handful of keys
            return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number else None


def _plain(document: Document) -> Iterator[Fields]:
    yield from document["rows"]


def _codecs(document: Document) -> Iterator[Fields]:
    # Version 1 had recorded tensors only, and did not say so.
    for row in document["rows"]:
        yield {"family": "recorded", **row}


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


def _timing(name: str, key: str) -> Measure:
    return Measure(name, (key, "median_s"), (key, "low_s"), (key, "high_s"))


def _bytes(name: str, key: str) -> Measure:
    return Measure(name, (key,), timed=False)


_OF_OFF: Final = Measure(
    "step / off's", ("time_of_off",), ("time_of_off_spread", 0), ("time_of_off_spread", 1)
)
_RATIO: Final = Measure("ratio", ("ratio",), more_is_better=True, timed=False)

KINDS: Final = (
    Kind(
        "codecs",
        _codecs,
        ("family", "data", "dtype", "nbytes", "zeros", "codec"),
        (_timing("encode s", "encode"), _timing("decode s", "decode"), _RATIO),
    ),
    Kind(
        "swap",
        _plain,
        ("model", "method"),
        (
            _timing("step s", "step"),
            _OF_OFF,
            Measure("peak saved bytes", ("peak_saved_bytes",)),
            _RATIO,
        ),
    ),
    Kind(
        "workloads",
        _plain,
        ("workload", "way"),
        (
            Measure(
                "step / plain's",
                ("time_of_plain",),
                ("time_of_plain_spread", 0),
                ("time_of_plain_spread", 1),
            ),
            _bytes("held bytes", "held_bytes"),
            _bytes("peak bytes", "peak_bytes"),
        ),
    ),
    Kind(
        "alone",
        _plain,
        ("model", "way"),
        (
            _timing("step s", "step"),
            _OF_OFF,
            Measure("fresh pages", ("pages",)),
            Measure("growth bytes", ("growth_bytes",)),
        ),
    ),
    Kind(
        "inlined",
        _plain,
        ("model", "way"),
        (
            Measure(
                "step / plain's",
                ("time_of_plain",),
                ("time_of_plain_spread", 0),
                ("time_of_plain_spread", 1),
            ),
            _bytes("saved bytes", "saved_bytes"),
        ),
    ),
    Kind(
        "fit",
        _plain,
        ("model", "share", "method"),
        (
            _OF_OFF,
            Measure("added / checkpoint's", ("added_of_checkpoint",)),
            Measure("peak bytes", ("peak_bytes",)),
        ),
    ),
    Kind(
        "overhead",
        _overhead,
        ("hooks", "tensor"),
        (Measure("us", ("us",), ("low_us",), ("high_us",)),),
    ),
    Kind(
        "accuracy",
        _accuracy,
        ("model", "policy"),
        (
            Measure("validation loss", ("validation_loss",), timed=False),
            _bytes("held bytes", "held_bytes"),
        ),
    ),
    Kind(
        "accuracy pilot",
        _plain,
        ("model",),
        (
            Measure("validation loss", ("validation_loss",), timed=False),
            Measure("margin", ("margin",), timed=False),
        ),
    ),
    Kind(
        "accuracy schedule",
        _plain,
        ("schedule",),
        (
            Measure("validation loss", ("validation_loss",), timed=False),
            _bytes("encoded bytes per step", "encoded_bytes_per_step"),
        ),
    ),
    Kind(
        "demo",
        _plain,
        ("model", "mode"),
        (
            Measure("step ms", ("step_ms",)),
            Measure(
                "step / off's",
                ("step_time_rel",),
                ("step_time_rel_quartiles", 0),
                ("step_time_rel_quartiles", 1),
            ),
            Measure("peak saved bytes", ("peak_saved_bytes",)),
            _RATIO,
        ),
    ),
    Kind(
        "advisor",
        _advisor,
        ("model", "machine", "mode"),
        (
            Measure("advisor s", ("advisor_s",)),
            Measure("oracle s", ("oracle_s",)),
            Measure("cost s", ("cost_s",)),
            Measure("step ms", ("step_ms",)),
        ),
    ),
    Kind(
        "plans",
        _plans,
        ("model", "batch", "hardware", "share", "policy"),
        (
            Measure("of ideal", ("of_ideal",), more_is_better=True, timed=False),
            Measure("planning s", ("planning_s",)),
        ),
    ),
    Kind(
        "sparsity",
        _sparsity,
        ("model", "activation"),
        (
            Measure("loss after", ("losses", -1), timed=False),
            Measure("training s", ("seconds",)),
        ),
    ),
    Kind(
        "papers",
        _papers,
        ("system", "what", "gpu"),
        # Of some more is better, of some less, and searches end by the clock: no verdict.
        (Measure("ours", ("ours",)),),
    ),
    Kind(
        "gpu codecs",
        _plain,
        ("data", "dtype", "nbytes", "codec", "threads", "blocks_per_sm"),
        (_timing("encode s", "encode"), _timing("decode s", "decode"), _RATIO),
    ),
    Kind(
        "gpu link",
        _plain,
        ("way", "blocks", "nbytes"),
        (Measure("GB/s", ("gb_per_s",), more_is_better=True),),
    ),
    Kind(
        "gpu swap",
        _plain,
        ("data", "dtype", "nbytes", "way"),
        (_timing("out s", "out"), _timing("back s", "back"), _RATIO),
    ),
    Kind(
        "gpu training",
        _plain,
        ("model", "batch", "method"),
        (_timing("step s", "step"), _bytes("peak allocated bytes", "peak_allocated_bytes")),
    ),
    Kind(
        "gpu static",
        _plain,
        ("codec", "dtype", "direction", "architecture"),
        (
            Measure("instructions per 32 words", ("instructions",), timed=False),
            Measure("registers", ("registers",), timed=False),
        ),
    ),
    Kind(
        "gpu build",
        _plain,
        ("architectures",),
        (Measure("build s", ("build_s",)), _bytes("file bytes", "nbytes")),
    ),
    Kind(
        "twin",
        _plain,
        ("profile", "model", "method"),
        (
            Measure("step s, simulated", ("step_s",), timed=False),
            _bytes("peak bytes, simulated", "peak_bytes"),
        ),
    ),
    Kind(
        "twin policies",
        _plain,
        ("model", "policy"),
        (
            Measure("step s, simulated", ("done", "step_s"), timed=False),
            Measure("peak bytes, simulated", ("done", "peak_bytes"), timed=False),
        ),
    ),
    Kind(
        "twin validation",
        _plain,
        ("row", "figure"),
        (Measure("error", ("error",), timed=False),),
    ),
)
