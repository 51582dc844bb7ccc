"""Measures codecs case by case, and goes on where an earlier run was interrupted."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from rich.console import Console
from rich.progress import Progress

from cswap.codecs.registry import get_codec
from cswap.codecs.tiled import all_threads
from cswap.errors import UnsupportedError
from cswap.experiments.codecs.contenders import measure
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cswap.experiments.codecs.case import Case
    from cswap.experiments.files.resumable import Partial

VERSION: Final = 2
"""Version of the result file. 1 had only recorded tensors, and rows without family and zeros."""


def codec_names(text: str) -> list[str]:
    """The comma-separated codecs of an option.

    Raises:
        ConfigError: one of them is unknown.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        get_codec(name)
    return found


def set_threads(threads: int) -> None:
    """Let codecs and memcpy use so many threads."""
    torch.set_num_threads(threads)
    all_threads.cache_clear()


def measured(
    cases: Sequence[Case], unfinished: Partial, rounds: int, codecs: Sequence[str], console: Console
) -> list[dict[str, Any]]:
    """The rows of all cases, those of an earlier run included.

    Args:
        cases: the tensors.
        unfinished: the result file; each case is a part.
        rounds: counted rounds.
        codecs: names; empty for each case's own.
        console: shows a bar; beside a pipe, each case is a line on stderr.
    """
    if unfinished.went_on:
        console.print(f"Going on: {unfinished.went_on} data sets were measured before.")
    rows: list[dict[str, Any]] = []
    lines = Console(stderr=True, quiet=console.is_terminal)
    with Progress(console=console, transient=True) as progress:
        for i, case in enumerate(progress.track(cases, description="measuring")):
            lines.print(literal(f"Measuring {i + 1} of {len(cases)}: {case.data}"), soft_wrap=True)
            make = partial(_rows, case, rounds, tuple(codecs))
            rows += unfinished.part(f"{i} {case.family} {case.data} {case.nbytes}", make)
    return rows


def _rows(case: Case, rounds: int, only: tuple[str, ...]) -> list[dict[str, Any]]:
    return [asdict(row) for row in measure(case, rounds, only)]


def say_what_is_written(path: Path, draw: Callable[[], Sequence[Path]], console: Console) -> None:
    """Draw the pictures, and name the result file and them; without matplotlib, say so."""
    console.print(literal(f"Written: {path}"), soft_wrap=True)
    try:
        drawn = draw()
    except UnsupportedError as error:
        console.print(literal(f"No pictures: {error}"), soft_wrap=True)
        return
    for picture in drawn:
        console.print(literal(f"Written: {picture}"), soft_wrap=True)
