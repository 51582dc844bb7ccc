"""Kernels that a machine needs first, compiled by a process beside the training.

Note [the first use of a machine]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Numba compiles a kernel where it is first called. That takes seconds, in which Numba holds Python's
lock: a thread beside the training would stop it. A process does not, and it leaves the machine code
in Numba's folder. There it also leaves marks, which say for which dtypes that has been done. The
name of a mark depends on the sources, the versions and the processor, as Numba's choice of machine
code does. So whoever finds a mark compiles little or nothing.

One process compiles at a time; those of other trainings, ranks for example, wait for it, and then
find its marks. It outlives its training: the next one needs the kernels, too.
``CSWAP_CALIBRATE=0`` switches this off.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numba
from numba.core.registry import cpu_target

from cswap.log import log
from cswap.schema.tensor import dtype_name
from cswap_kernels import jit
from cswap_kernels.jit import numba_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

PROGRAM: Final = """
import fcntl, sys
sys.path[:] = [path for path in sys.path if path]
lock = open(sys.argv[1], "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX)
except OSError:  # the file system has no locks
    pass
from cswap.warm import first_use
first_use(sys.argv[2:])
"""
"""Of the process; its arguments are a file to be locked, and names of dtypes."""

LOCK: Final = "first-use.lock"

MOST_S: Final = 600.0
"""How long a training waits: another one's process may stand still."""

_started: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], float]] = {}
"""The processes of this training, and when they began, by the dtypes."""


def missing(dtypes: Iterable[torch.dtype]) -> list[str]:
    """Names of the dtypes for which this machine has no kernels yet.

    None where they cannot be kept, or where nothing is to be done beside the training.
    """
    if os.environ.get("CSWAP_CALIBRATE") == "0" or numba.config.DISABLE_JIT:
        return []
    # Of a program that embeds Python, or is one file with it, another run would begin.
    if "python" not in Path(sys.executable or "").name.lower():
        return []
    return unmarked(map(dtype_name, dtypes))


def note_compiled(dtypes: Iterable[str]) -> None:
    """Mark that all kernels of a first use are compiled for these dtypes. Args: dtypes: names."""
    folder = numba_folder()
    for name in () if folder is None else dtypes:
        with suppress(OSError):  # of a full disk: the next first use loads the kernels once more
            _mark(folder, name).touch()


def begin(dtypes: Sequence[str]) -> None:
    """Let a process compile the kernels for these dtypes. Args: dtypes: names, as of `missing`.

    Raises:
        OSError: no process can be started.
    """
    folder, key = numba_folder(), tuple(dtypes)
    if folder is None or key in _started:
        return
    paths: list[Any] = [*sys.path]  # some programs put a `Path` there, which counts for nothing
    found = [str(Path(path).absolute()) for path in paths if isinstance(path, str)]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder / LOCK), *dtypes],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(found), "CSWAP_CALIBRATE": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the training
    )
    _started[key] = process, time.monotonic()


def is_done(dtypes: Sequence[str]) -> bool:
    """Whether the kernels are there, or will not be. Args: dtypes: see `begin`."""
    if not unmarked(dtypes):
        return True
    process, began_s = _started[tuple(dtypes)]
    code = process.poll()  # 0 in a fork, whose process it is not
    waits = code is None and time.monotonic() - began_s < MOST_S
    if code or (code is None and not waits):
        log.warning("Kernels were not compiled beside the training (exit status %s).", code)
    return not waits


def unmarked(dtypes: Iterable[str]) -> list[str]:
    """Those of the dtypes for which there is no mark. Args: dtypes: names."""
    folder = numba_folder()
    return [] if folder is None else [x for x in dtypes if not _mark(folder, x).exists()]


def _mark(folder: Path | None, dtype: str) -> Path:
    assert folder is not None  # the caller has looked
    return folder / f"compiled-{dtype}-{_stamp()}"


@cache
def _stamp() -> str:
    # See the Note.
    machine = cpu_target.target_context.codegen().magic_tuple()
    found = hashlib.sha256(repr((numba.__version__, sys.version, sys.prefix, machine)).encode())
    for source in sorted(Path(jit.__file__).parent.glob("*.py")):
        found.update(source.read_bytes())
    return found.hexdigest()[:12]
