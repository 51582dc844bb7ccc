"""Kernels that a machine needs first, compiled by a process beside the training: `Compiling`.

Note [the first use of a machine]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Numba compiles a kernel where it is first called. That takes seconds, in which Numba holds Python's
lock: a thread beside the training would stop it. A process does not, and it leaves the machine code
in Numba's folder. A mark there says for which dtypes that has been done. Its name has all that
Numba compares before it loads machine code: the sources, the versions and the processor.

One process at a time compiles on a machine. The others, ranks for example, wait for its marks.
``CSWAP_CALIBRATE=0`` switches this off, like all that is done once per machine beside training.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import llvmlite.binding
import numba

from cswap.log import log
from cswap.schema.tensor import dtype_name
from cswap_kernels import jit
from cswap_kernels.jit import numba_folder

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

PROGRAM: Final = "import sys; from cswap.warm import first_use; first_use(sys.argv[1:])"
"""Of the process; its arguments are names of dtypes."""

LOCK: Final = "first-use.lock"
"""Held by the process that has begun to compile; the system lets go of it."""


def missing(dtypes: Iterable[torch.dtype]) -> list[str]:
    """Names of the dtypes for which this machine has no kernels yet.

    None where they cannot be kept, or where nothing is to be done beside the training.
    """
    if os.environ.get("CSWAP_CALIBRATE") == "0" or numba.config.DISABLE_JIT:
        return []
    # Of a program that embeds Python, or is one file with it, another run would begin.
    if "python" not in Path(sys.executable or "").name.lower():
        return []
    folder = numba_folder()
    if folder is None:
        return []
    return [name for name in map(dtype_name, dtypes) if not _mark(folder, name).exists()]


class Compiling:
    """Compiles kernels in a process of its own, or waits for the one that does."""

    def __init__(self, dtypes: list[str]) -> None:
        """Begin. Args: dtypes: names, as `missing` gives them.

        Raises:
            OSError: no process can be started, or Numba's folder cannot be written.
        """
        folder = numba_folder()
        if folder is None:
            raise OSError("there is no folder for compiled kernels")
        self._marks = [_mark(folder, name) for name in dtypes]
        self._dtypes = dtypes
        self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._lock)
        self._kill: weakref.finalize[..., Compiling] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._begin()

    @property
    def done(self) -> bool:
        """Whether the kernels are there, or will not be."""
        if all(mark.exists() for mark in self._marks):
            self.end()
            return True
        if self._process is None:
            self._begin()  # the process of another training has ended before it was done
            return False
        code = self._process.poll()
        if code is None:
            return False
        if code:
            log.warning("Kernels could not be compiled beside the training: exit status %s.", code)
        else:
            for mark in self._marks:
                with suppress(OSError):
                    mark.touch()
        self.end()
        return True

    def end(self) -> None:
        """Compile no further. A second time does nothing."""
        if self._kill is not None:
            self._kill()
        self._close()

    def _begin(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another one compiles
            return
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *self._dtypes],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CSWAP_CALIBRATE": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training
        )
        self._kill = weakref.finalize(self, _end, self._process, os.getpid())


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    if os.getpid() == parent:  # and not a fork of it that ends
        process.kill()
        process.wait()


def _mark(folder: Path, dtype: str) -> Path:
    return folder / f"compiled-{dtype}-{_stamp()}"


@cache
def _stamp() -> str:
    # See the Note.
    found = hashlib.sha256(f"{numba.__version__} {sys.version} {sys.prefix}".encode())
    found.update(llvmlite.binding.get_host_cpu_name().encode())
    for source in sorted(Path(jit.__file__).parent.glob("*.py")):
        found.update(source.read_bytes())
    return found.hexdigest()[:12]
