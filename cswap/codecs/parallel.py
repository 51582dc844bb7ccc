"""Splits the tiles of one tensor over threads."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_RANGES: Final = 8
"""Most threads per tensor: with more, memory bandwidth limits the codecs."""

MIN_RANGE_TILES: Final = 128
"""Fewest tiles of a range. Handing a range to a thread takes tens of microseconds; the fastest
codecs take less than one microsecond per tile.
"""


@dataclass(frozen=True, slots=True)
class RangeShape:
    """Limits of the split of one tensor's tiles, for the tuner to choose. The bytes stay the same.

    Attributes:
        ranges: most ranges.
        least: fewest tiles of a range.
    """

    ranges: int = MAX_RANGES
    least: int = MIN_RANGE_TILES

    def __post_init__(self) -> None:
        if not 1 <= self.ranges <= MAX_RANGES or self.least < 1:
            raise ConfigError(f"{self}: ranges must be 1 to {MAX_RANGES}, least at least 1.")


DEFAULT_SHAPE: Final = RangeShape()

SHAPES: Final[dict[str, RangeShape]] = {}
"""Shapes other than the default, by codec and direction: "zvc-encode"."""

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def split(n_tiles: int, threads: int, shape: RangeShape = DEFAULT_SHAPE) -> list[tuple[int, int]]:
    """Cut ``n_tiles`` into at most ``threads`` ranges, as the shape allows.

    >>> split(300, 2), split(200, 2)
    ([(0, 150), (150, 300)], [(0, 200)])
    """
    n = max(1, min(threads, n_tiles // shape.least, shape.ranges))
    edges = [n_tiles * i // n for i in range(n + 1)]
    return list(itertools.pairwise(edges))


def run_ranges(job: Callable[[int, int, int], T], ranges: list[tuple[int, int]]) -> list[T]:
    """Call ``job(index, first, last)`` for each range; the caller's thread takes the first.

    A job must not call this function: the pool has no spare thread for waiting. An exception of a
    job is raised here once all jobs have ended, so that the caller may free their memory.
    """
    futures: list[Future[T]] = [
        _threads().submit(job, i, *ranges[i]) for i in range(1, len(ranges))
    ]
    try:
        first = job(0, *ranges[0])
    finally:
        wait(futures)
    return [first, *(f.result() for f in futures)]


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MAX_RANGES, thread_name_prefix="cswap-tiles")
        return _pool


def _forget_pool() -> None:
    # A forked child inherits the pool's state, but none of its threads. The lock is replaced, too,
    # because a thread of the parent may have held it during the fork.
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
