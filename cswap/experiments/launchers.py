"""Run the parts of an experiment: in this process, in several, or in torchrun's ranks.

Each part makes all its random numbers from its own seed, so every launcher gives the same losses.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import torch.distributed as dist
import typer

from cswap.errors import ConfigError
from cswap.experiments.options import needs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

P = TypeVar("P")
R = TypeVar("R")

LOCAL: Final = "local"
TORCHRUN: Final = "torchrun"
LAUNCHERS: Final = (LOCAL, TORCHRUN)

LONGEST: Final = timedelta(days=2)
"""Time that a rank waits for the others, each with a part that takes as long as it takes."""

LauncherOption = Annotated[
    str,
    typer.Option(
        "--launcher",
        help="Who runs the parts: local; or torchrun (start the command with it).",
    ),
]
JobsOption = Annotated[
    int, typer.Option("--jobs", help="Processes that train, with the local launcher.", min=1)
]


class Launcher:
    """Runs parts, and gives each result as soon as it is there.

    Args:
        name: one of `LAUNCHERS`.
        jobs: processes of "local"; 1 stays in this one.

    Raises:
        ConfigError: an unknown name, `jobs` of another launcher, or torchrun did not start this
            process.
        UnsupportedError: a package of the launcher is not installed.
    """

    def __init__(self, name: str = LOCAL, jobs: int = 1) -> None:
        if name not in LAUNCHERS:
            raise ConfigError(f"--launcher {name!r}: unknown; known are {', '.join(LAUNCHERS)}.")
        self.name, self.jobs = name, jobs
        if jobs > 1 and self.name != LOCAL:
            raise ConfigError(f"--jobs {jobs}: --launcher {self.name} has its own number.")
        if self.name == TORCHRUN and "RANK" not in os.environ:
            raise ConfigError(
                "--launcher torchrun: start the command with it, such as torchrun "
                "--nproc-per-node 4 -m cswap bench accuracy --launcher torchrun."
            )
        if jobs > 1:
            needs(f"--jobs {jobs}", "joblib")

    @property
    def stays_here(self) -> bool:
        """Whether the parts run in this process, one after another."""
        return self.name == LOCAL and self.jobs == 1

    @property
    def reports(self) -> bool:
        """Whether this process shows and writes the results; of torchrun's ranks, the first."""
        return self.name != TORCHRUN or os.environ["RANK"] == "0"

    def run(self, work: Callable[[P], R], parts: Sequence[P]) -> Iterator[tuple[P, R]]:
        """Parts with their results, in the order in which they end.

        A process of torchrun that does not report ends here, when all parts are done.

        Args:
            work: makes a result from a part; both, and the results, can be pickled.
            parts: the work.
        """
        if self.stays_here:
            return ((part, work(part)) for part in parts)
        return self._by_processes(work, parts) if self.name == LOCAL else _by_ranks(work, parts)

    def _by_processes(self, work: Callable[[P], R], parts: Sequence[P]) -> Iterator[tuple[P, R]]:
        from joblib import Parallel, delayed

        run = Parallel(n_jobs=self.jobs, return_as="generator_unordered")
        yield from run(delayed(_pair)(work, part) for part in parts)


def _pair(work: Callable[[P], R], part: P) -> tuple[P, R]:
    return part, work(part)


def _by_ranks(work: Callable[[P], R], parts: Sequence[P]) -> Iterator[tuple[P, R]]:
    dist.init_process_group("gloo", timeout=LONGEST)
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        # The first rank has read which parts are done; other machines may not see its files.
        told = [list(parts)]
        dist.broadcast_object_list(told)
        for first in range(0, len(told[0]), world):
            mine = told[0][first + rank : first + rank + 1]
            results: list[Any] | None = [None] * world if rank == 0 else None
            dist.gather_object([_pair(work, part) for part in mine], results)
            for pairs in results or ():
                yield from pairs
    finally:
        dist.destroy_process_group()
    if rank != 0:
        raise typer.Exit(0)
