"""Kinds of result files: their marks, the place of their rows, the rows' keys and measures.

`compare`, `report` and the test of the committed files all go by this table.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cswap.display import short, shown
from cswap.errors import ConfigError
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

Document = dict[str, Any]
Fields = dict[str, Any]


class ResultFileError(ConfigError):
    """A result file cannot be read, or is not one that the benchmarks write."""


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
        marks: keys that only this kind's documents have, for those that do not name their kind;
            none where all documents name it.
        rows: returns the rows of a document.
        key: fields that name a row; fields that are missing or None are left out.
        measures: the figures that are compared.
        file: name of the file among the committed results.
    """

    name: str
    marks: tuple[str, ...]
    rows: Callable[[Document], Iterator[Fields]]
    key: tuple[str, ...]
    measures: tuple[Measure, ...]
    file: str


def load(path: Path) -> Document:
    """Read a result file.

    Raises:
        ResultFileError: the file cannot be read, or is not a JSON object with an environment.
    """
    found = read_object(path, "file", ResultFileError)
    if not isinstance(found.get("environment"), dict):
        raise ResultFileError(
            f"{path}: has no 'environment'. Name a result file that `python -m bench` wrote."
        )
    return found


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """A context for making tables and pictures of a file; missing fields become its error.

    Raises:
        ResultFileError: a field is missing, or has another type than a benchmark writes.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ResultFileError(
            f"{path}: lacks something, or has it in another form ({short(str(error))}). Name a "
            "file that this version of the benchmarks wrote."
        ) from error


def kind_of(document: Document, path: Path) -> Kind:
    """The kind of a document, by its field ``kind`` or by its keys.

    Raises:
        ResultFileError: the kind is unknown.
    """
    named = document.get("kind", _part(document))
    for kind in KINDS:
        marked = kind.marks and set(kind.marks) <= _keys(document)
        if kind.name == named or (named is None and marked):
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


def _part(document: Document) -> str | None:
    part = document.get("part")
    return None if part is None else f"gpu {part}"


def _keys(document: Document) -> set[str]:
    rows = document.get("rows")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    return {*document, *(f"rows.{key}" for key in first)}


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
        ("rows.encode_of_memcpy",),
        _codecs,
        ("family", "data", "dtype", "nbytes", "zeros", "codec"),
        (_timing("encode s", "encode"), _timing("decode s", "decode"), _RATIO),
        "codecs.json",
    ),
    Kind(
        "swap",
        ("rows.time_of_off",),
        _plain,
        ("model", "method"),
        (
            _timing("step s", "step"),
            _OF_OFF,
            Measure("peak saved bytes", ("peak_saved_bytes",)),
            _RATIO,
        ),
        "swap.json",
    ),
    Kind(
        "workloads",
        ("packages",),
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
        "workloads.json",
    ),
    Kind(
        "alone",
        (),
        _plain,
        ("model", "way"),
        (
            _timing("step s", "step"),
            _OF_OFF,
            Measure("fresh pages", ("pages",)),
            Measure("growth bytes", ("growth_bytes",)),
        ),
        "alone.json",
    ),
    Kind(
        "inlined",
        (),
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
        "inlined.json",
    ),
    Kind(
        "fit",
        (),
        _plain,
        ("model", "share", "method"),
        (
            _OF_OFF,
            Measure("added / checkpoint's", ("added_of_checkpoint",)),
            Measure("peak bytes", ("peak_bytes",)),
        ),
        "fit.json",
    ),
    Kind(
        "overhead",
        ("microseconds",),
        _overhead,
        ("hooks", "tensor"),
        (Measure("us", ("us",), ("low_us",), ("high_us",)),),
        "overhead.json",
    ),
    Kind(
        "accuracy",
        ("gradient_errors", "runs"),
        _accuracy,
        ("model", "policy"),
        (
            Measure("validation loss", ("validation_loss",), timed=False),
            _bytes("held bytes", "held_bytes"),
        ),
        "accuracy/results.json",
    ),
    Kind(
        "accuracy pilot",
        (),
        _plain,
        ("model",),
        (
            Measure("validation loss", ("validation_loss",), timed=False),
            Measure("margin", ("margin",), timed=False),
        ),
        "accuracy/pilot.json",
    ),
    Kind(
        "accuracy schedule",
        (),
        _plain,
        ("schedule",),
        (
            Measure("validation loss", ("validation_loss",), timed=False),
            _bytes("encoded bytes per step", "encoded_bytes_per_step"),
        ),
        "accuracy/schedule.json",
    ),
    Kind(
        "demo",
        ("how_measured",),
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
        "demo.json",
    ),
    Kind(
        "advisor",
        ("prediction", "cells"),
        _advisor,
        ("model", "machine", "mode"),
        (
            Measure("advisor s", ("advisor_s",)),
            Measure("oracle s", ("oracle_s",)),
            Measure("cost s", ("cost_s",)),
            Measure("step ms", ("step_ms",)),
        ),
        "advisor.json",
    ),
    Kind(
        "plans",
        ("policies", "cells"),
        _plans,
        ("model", "batch", "hardware", "share", "policy"),
        (
            Measure("of ideal", ("of_ideal",), more_is_better=True, timed=False),
            Measure("planning s", ("planning_s",)),
        ),
        "plans.json",
    ),
    Kind(
        "sparsity",
        ("codecs", "runs"),
        _sparsity,
        ("model", "activation"),
        (
            Measure("loss after", ("losses", -1), timed=False),
            Measure("training s", ("seconds",)),
        ),
        "sparsity.json",
    ),
    Kind(
        "papers",
        ("means", "cells"),
        _papers,
        ("system", "what", "gpu"),
        # Of some more is better, of some less, and searches end by the clock: no verdict.
        (Measure("ours", ("ours",)),),
        "papers.json",
    ),
    Kind(
        "gpu codecs",
        ("rows.encode_of_copy",),
        _plain,
        ("data", "dtype", "nbytes", "codec", "threads", "blocks_per_sm"),
        (_timing("encode s", "encode"), _timing("decode s", "decode"), _RATIO),
        "codecs.json",
    ),
    Kind(
        "gpu link",
        ("rows.raw_gb_per_s",),
        _plain,
        ("way", "blocks", "nbytes"),
        (Measure("GB/s", ("gb_per_s",), more_is_better=True),),
        "link.json",
    ),
    Kind(
        "gpu swap",
        ("rows.less_than_copy",),
        _plain,
        ("data", "dtype", "nbytes", "way"),
        (_timing("out s", "out"), _timing("back s", "back"), _RATIO),
        "swap.json",
    ),
    Kind(
        "gpu training",
        ("rows.time_of_oracle",),
        _plain,
        ("model", "batch", "method"),
        (_timing("step s", "step"), _bytes("peak allocated bytes", "peak_allocated_bytes")),
        "training.json",
    ),
    Kind(
        "gpu static",
        (),
        _plain,
        ("codec", "dtype", "direction", "architecture"),
        (
            Measure("instructions per 32 words", ("instructions",), timed=False),
            Measure("registers", ("registers",), timed=False),
        ),
        "kernels.json",
    ),
    Kind(
        "gpu build",
        (),
        _plain,
        ("architectures",),
        (Measure("build s", ("build_s",)), _bytes("file bytes", "nbytes")),
        "kernels-build.json",
    ),
    Kind(
        "twin",
        (),
        _plain,
        ("profile", "model", "method"),
        (
            Measure("step s, simulated", ("step_s",), timed=False),
            _bytes("peak bytes, simulated", "peak_bytes"),
        ),
        "twin.json",
    ),
    Kind(
        "twin policies",
        (),
        _plain,
        ("model", "policy"),
        (
            Measure("step s, simulated", ("done", "step_s"), timed=False),
            Measure("peak bytes, simulated", ("done", "peak_bytes"), timed=False),
        ),
        "policies.json",
    ),
    Kind(
        "twin validation",
        (),
        _plain,
        ("row", "figure"),
        (Measure("error", ("error",), timed=False),),
        "validation.json",
    ),
)
