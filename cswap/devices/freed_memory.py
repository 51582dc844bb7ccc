"""Keeps memory that is freed within the process, while tensors of its own memory are swapped.

Note [fresh pages]
~~~~~~~~~~~~~~~~~~
glibc gives the free end of its heap back to the system as soon as that is larger than about twice
the largest block that was freed. A training step frees its activations and takes as much again a
moment later, page by page, each filled with zeros by the system. How many pages go depends on the
order of the last blocks, and so on chance. Swapping frees and takes more often than a step without
it, and may lose more by this.

So glibc is told to keep its heap, until nothing is swapped any more. Then a process has at all
times as much as it took at most. The first steps take more than later ones: codecs are tried, and
no place is known. So the heap is given back after backward number 16, and whenever that number has
become four times as large: the next step takes fresh pages, and no more of them than it needs.

What the process asked for itself is left alone: an environment variable of malloc's is a wish.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cache
from typing import Final

from cswap.log import log

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Names of glibc's parameters, as malloc.h has them."""

NEVER: Final = -1
"""Of M_TRIM_THRESHOLD: the heap's end is never given back (mallopt(3))."""

LARGEST_IN_HEAP: Final = 32 << 20
"""Bytes from which a block has pages of its own: the most that glibc raises the limit to by itself.
"""

END_KEPT: Final = 2 * LARGEST_IN_HEAP
"""Bytes of the heap's end that glibc keeps by itself with that limit."""

WISHES: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Environment variables by which a user says how malloc is to do this (mallopt(3))."""

TUNABLES: Final = "GLIBC_TUNABLES"
"""The same for all of glibc; those of malloc have MALLOC in their names."""

MALLOC: Final = "glibc.malloc."

FIRST_GIVEN_BACK: Final = 16
"""Backwards after which the heap is given back for the first time: most codecs have been tried."""

TIMES: Final = 4
"""Factor from one such number of backwards to the next."""

_holders: set[object] = set()
"""A key for each `FreedMemory`. Threads change it without a lock: at worst, pages are fresh."""


class FreedMemory:
    """While one lives and is not released, memory that is freed stays within the process."""

    __slots__ = ("__weakref__", "_backwards", "_end", "_next")

    def __init__(self) -> None:
        """Begin."""
        key = object()
        if not _holders:
            _tell(NEVER)
        _holders.add(key)
        self._end = weakref.finalize(self, _end, key)
        self._end.atexit = False
        self._backwards, self._next = 0, FIRST_GIVEN_BACK

    def backward_ended(self) -> None:
        """A backward has ended: see Note [fresh pages]."""
        self._backwards += 1
        if self._backwards == self._next and self._end.alive:
            self._next *= TIMES
            _give_back()

    def release(self) -> None:
        """Give freed memory back, unless another one lives."""
        if self._end.alive:
            self._end()
            if not _holders:
                _give_back()


def _end(key: object) -> None:
    # Gives nothing back yet: an engine that nobody needs any more may have a successor at once.
    _holders.discard(key)
    if not _holders:
        _tell(END_KEPT)


def _tell(trim_threshold: int) -> None:
    libc = _libc()
    if libc is None:
        return
    for name, value in ((M_MMAP_THRESHOLD, LARGEST_IN_HEAP), (M_TRIM_THRESHOLD, trim_threshold)):
        if not libc.mallopt(name, value):  # it may know no such parameter
            log.debug("mallopt(%d, %d) was refused", name, value)
            return


def _give_back() -> None:
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    # glibc, if it is to be told.
    wished = any(name in os.environ for name in WISHES) or MALLOC in os.environ.get(TUNABLES, "")
    return None if wished else _glibc()


@cache
def _glibc() -> ctypes.CDLL | None:
    # glibc; None: this is another C library.
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no name for it
        return None
    names = ("gnu_get_libc_version", "mallopt", "malloc_trim")
    return libc if all(hasattr(libc, name) for name in names) else None
