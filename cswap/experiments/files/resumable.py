"""Long benchmarks continue after an interrupt: a file beside the result holds the finished parts.

The result file itself is written when all parts are finished, so a committed file is never
incomplete.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from cswap.errors import ConfigError
from cswap.experiments.files.environment import environment
from cswap.experiments.files.writing import write
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    Part = Callable[[Callable[[], object]], list[dict[str, Any]]]

P = TypeVar("P")
R = TypeVar("R")
SUFFIX: Final = ".partial.json"


class Partial:
    """A result document that grows part by part, on the disk after each.

    Args:
        out: the result file; the unfinished one has SUFFIX instead of its own. None: no file.
        kind: the command's name.
        version: version of the document's format.
        settings: the options, as JSON-able values. An unfinished file with other settings, another
            version or other code is not continued, because its figures would be from another
            experiment.
        again: whether to begin again in any case.

    Attributes:
        document: the content; a command adds its own keys.
        went_on: number of parts that were finished before.
    """

    def __init__(
        self,
        out: Path | None,
        *,
        kind: str,
        version: int,
        settings: dict[str, Any],
        again: bool = False,
    ) -> None:
        self.out, self.path = out, None if out is None else out.with_suffix(SUFFIX)
        self.document: dict[str, Any] = {
            "kind": kind,
            "version": version,
            "settings": settings,
            "environment": environment(),
            "done": {},
            "complete": False,
        }
        same = {"kind": kind, "version": version, "settings": settings}
        types = {"done": dict, "environment": dict}
        found = None if again or self.path is None else stored(self.path, types, **same)
        if found is not None and same_code(found, self.document):
            self.document = found
        self.went_on = len(self.document["done"])

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the JSON-able result of ``make``, which is called unless an earlier run has it."""
        done = self.document["done"]
        if name not in done:
            done[name] = make()
            self.save()
        return done[name]

    def parts(
        self, wanted: Mapping[str, P], work: Callable[..., R], jobs: int, console: Console
    ) -> list[R]:
        """The JSON-able results of all parts, those of an earlier run included, in order.

        Args:
            wanted: arguments by the names of the parts.
            work: makes a result from an argument; both, and the results, can be pickled. In this
                process it is given ``on_step``, too, to be called after each step.
            jobs: processes that run the missing parts; 1 stays in this one.
            console: where bars count the parts, and in this process the steps of all of them.
        """
        done = self.document["done"]
        missing = {argument: name for name, argument in wanted.items() if name not in done}
        with _bars(console) as progress:
            parts = progress.add_task("trainings", total=len(missing))
            if jobs == 1:
                steps = progress.add_task("steps", total=None)
                work = partial(work, on_step=partial(progress.advance, steps))
            for argument, result in results(work, list(missing), jobs):
                done[missing[argument]] = result
                self.save()
                progress.advance(parts)
        return [done[name] for name in wanted]

    def save(self) -> None:
        """Write the unfinished file as the document is now."""
        if self.path is not None:
            write(self.path, self.document)

    def rows_of_parts(
        self, parts: Mapping[str, Part], n_steps: int | None, console: Console
    ) -> list[dict[str, Any]]:
        """The rows of all parts, in turn, each with a bar of its steps.

        Args:
            parts: by name; each takes a function to be called after each step, and gives rows.
            n_steps: steps of each; None: not known before.
            console: where the bars are.
        """
        if self.went_on:
            console.print(f"Going on: {', '.join(self.document['done'])} done before.")
        rows: list[dict[str, Any]] = []
        with _bars(console) as progress:
            for name, measure in parts.items():
                task = progress.add_task(name, total=n_steps)
                rows += self.part(name, partial(measure, partial(progress.advance, task)))
                done = n_steps or progress.tasks[task].completed
                progress.update(task, total=done, completed=done)
        return rows

    def finish(self, **fields: Any) -> dict[str, Any]:
        """Write the result without the parts; ``fields`` hold the parts in their final form."""
        kept = {key: value for key, value in self.document.items() if key != "done"}
        document = {**kept, **fields, "complete": True}
        if self.out is not None and self.path is not None:
            write(self.out, document)
            self.path.unlink(missing_ok=True)
        return document


def results(work: Callable[[P], R], parts: Sequence[P], jobs: int) -> Iterator[tuple[P, R]]:
    """Parts with their results, in the order in which they end; see `Partial.parts`."""
    if jobs == 1:
        yield from ((part, work(part)) for part in parts)
        return
    # torch must not be forked while another of its threads works.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        running = {pool.submit(work, part): part for part in parts}
        for done in as_completed(running):
            yield running[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _bars(console: Console) -> Progress:
    bar = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn())
    return Progress(*bar, TimeElapsedColumn(), console=console)


def stored(
    path: Path, types: Mapping[str, type] = MappingProxyType({}), **same: Any
) -> dict[str, Any] | None:
    """Read the document at a path; None if it cannot be read or its fields do not match.

    Args:
        path: path of a JSON file.
        types: types of further fields that it must have.
        same: values of fields. They must match, so that new parts belong to the same experiment.
    """
    try:
        found = read_object(path, "file")
    except ConfigError:
        return None
    if not all(type(found.get(key)) is kind for key, kind in types.items()):
        return None
    return found if all(found.get(key) == value for key, value in same.items()) else None


def same_code(found: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether two documents measure the same code, by the digest in their environments."""
    first, second = (d["environment"].get("code") for d in (found, mine))
    return first is not None and bool(first == second)
