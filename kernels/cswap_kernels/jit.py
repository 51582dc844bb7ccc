"""Compiles kernels: Numba's ``njit``, protected against failures of the disk and of profilers.

Note [kernels without a cache]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Numba's cache raises an error if it finds no writable folder (a read-only package and no writable
home), if the disk is full, or if a file in it is damaged. A kernel does not need the cache: it is
then compiled again, and the logger ``cswap`` reports it once. `cswap doctor` reports it, too.

Note [one process at a time]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Numba keeps an index file per function, which names one file of machine code per signature. It
reads the index, adds a name and writes it without a lock. So two processes that store two
signatures at the same time may give both the same name, and later one signature finds the other's
code. Therefore a process locks the folder while it loads or stores a function. A POSIX lock ends
with its process, and a fork does not inherit it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy.ma  # noqa: F401 Numba would import it at the first call, see unwatched.py
from numba.core import config
from numba.core.caching import FunctionCache, NullCache
from numba.core.compiler_lock import global_compiler_lock

from cswap_kernels import inner_functions
from cswap_kernels.unwatched import unwatched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("cswap")

UNCACHED: Final = (
    "Every process compiles them anew, which takes seconds. "
    "Remedy: set NUMBA_CACHE_DIR to a folder that you can write, and nobody else."
)

LOCK_WAIT_S: Final = 5.0
"""Seconds to wait for another process that uses the same folder. After that, a kernel is compiled
and not stored."""

_waited_in_vain = Event()
"""Whether the last wait for such a process timed out: then the next attempt does not wait."""

COMPILING: Final = (
    "Compiling kernels, once per machine: up to a minute. `cswap warm` does it beforehand."
)

told_of_compiling = Event()
"""Whether this process has said that it compiles; set beforehand, it says nothing."""

_spent_s = [0.0]
"""Seconds of all compilations of this process."""

_told = Event()
"""Whether this process has reported that it cannot store kernels."""


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with ``numba.njit``.

    Args:
        cache: whether to keep the machine code on disk, if possible.
        options: Numba's options.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(**options)(function)  # noqa: TID251 only this file may call it
        if not config.DISABLE_JIT:  # with DISABLE_JIT it is the plain function
            compiled.compile = partial(_compile_unwatched, compiled.compile)
            # Numba copies the code of a function that is always inlined: nobody links it.
            if inner_functions.SUPPORTED and options.get("inline") != "always":
                inner_functions.attach(compiled, function, options)
            if cache:
                compiled._cache = DiskCache(function)  # noqa: SLF001 Numba has no other way
        return compiled

    return decorate


def numba_folder() -> Path | None:
    """Folder in which Numba stores these kernels; None: there is no writable folder."""
    try:
        return Path(FunctionCache(numba_folder).cache_path)
    except (OSError, RuntimeError):
        return None


def compile_s() -> float:
    """Seconds that this process has spent compiling kernels, or loading them from the disk."""
    return _spent_s[0]


def _compile_unwatched(compile_now: Callable[[Any], Any], signature: Any) -> Any:
    # See Note [kernels under a profiler]. If a thread holds the compiler's lock, this thread may be
    # compiling a caller of this function. Another thread would then wait for the lock forever.
    if global_compiler_lock.is_locked():
        return compile_now(signature)
    began = time.perf_counter()
    try:
        return unwatched(compile_now, signature)
    finally:
        _spent_s[0] += time.perf_counter() - began


class DiskCache:
    """Numba's cache of one function, without errors if the disk fails.

    Numba calls the methods. See Note [kernels without a cache].
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._files: Any = None

    def _open(self) -> Any:
        # Called at the first compilation, not earlier, because Numba makes the folder and writes to
        # it.
        if self._files is None:
            self._files = FunctionCache(self._function)
        return self._files

    @property
    def cache_path(self) -> str | None:
        """Folder in use; None before the first compilation, or if there is no folder."""
        return None if self._files is None else self._files.cache_path

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Load the machine code for a signature; None: the function must be compiled."""
        found = None
        try:
            files = self._open()
            with _folder_to_itself(files.cache_path) as alone:
                found = files.load_overload(signature, context) if alone else None
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        except Exception as error:  # a damaged pickle can raise anything
            name = self._function.__qualname__
            _log.warning("%s: %s is damaged (%r): compiled anew.", self.cache_path, name, error)
            self.flush()
        if found is None and not isinstance(self._files, NullCache):  # of that, more was said
            _tell_of_compiling()
        return found

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Store the machine code for a signature."""
        try:
            files = self._open()
            with _folder_to_itself(files.cache_path) as alone:
                if alone:
                    files.save_overload(signature, compiled)
        except (OSError, RuntimeError) as error:
            self._give_up(error)

    def flush(self) -> None:
        """Forget all signatures."""
        try:
            self._open().flush()
        except (OSError, RuntimeError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._files = NullCache()
        if not _told.is_set():
            _told.set()
            _log.warning("Compiled kernels cannot be kept (%s). %s", error, UNCACHED)


def _tell_of_compiling() -> None:
    if not told_of_compiling.is_set():
        told_of_compiling.set()
        _log.warning(COMPILING)


@contextmanager
def _folder_to_itself(folder: str | None) -> Iterator[bool]:
    """Lock a folder of compiled kernels; yields False if another process holds it too long.

    A folder that cannot be locked (read-only, or a file system without locks) is used without a
    lock. See Note [one process at a time].
    """
    try:
        descriptor = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock the file within the time limit; True if the file system has no locks."""
    deadline = time.monotonic() + (0.0 if _waited_in_vain.is_set() else LOCK_WAIT_S)
    while not (locked := _try_lock(descriptor)) and time.monotonic() < deadline:
        time.sleep(0.001)
    if locked:
        _waited_in_vain.clear()
    else:
        _waited_in_vain.set()
    return locked


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both
        return False
    except OSError:
        return True
    return True
