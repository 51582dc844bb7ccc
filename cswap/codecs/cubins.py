"""Keeps the machine code of CUDA kernels on disk, because compiling one takes a second or more.

The code is in the cache folder, a file per kernel. Its name has the digest of the sources: kernels
of other sources are not found. ``python -m bench gpu build`` fills such a folder on any machine,
for one that has a GPU and no compiler: CSWAP_CACHE_DIR names it there.

Note [who may write the cache] explains which files are trusted.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from cswap import cache_folder
from cswap.schema.reading import parse_object

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cswap_kernels.cuda.compiler import Cubin


def key(name: str, threads: int) -> str:
    """The key of a kernel that is compiled for blocks of this number of threads.

    >>> key("zvc+int8-4-encode", 256)
    'zvc_int8-4-encode-256'
    """
    return f"{name}-{threads}".replace("+", "_")


def path_of(key: str, architecture: int, root: Path | None = None) -> Path:
    """The file of a kernel.

    Args:
        key: see `key`.
        architecture: 90 is sm_90.
        root: the cache folder; default: the user's.
    """
    from cswap_kernels.cuda.compiler import sources

    folder = (root or cache_folder.root()) / "kernels"
    return folder / f"{key}-sm_{architecture}-{sources()}.json"


def cached(key: str, architecture: int, compile_now: Callable[[], Cubin]) -> Cubin:
    """Return a kernel from the cache folder; else compile it and store it there.

    A cache that cannot be read or written is ignored, with one message in the log.
    """
    path = path_of(key, architecture)
    found = cache_folder.read(path)
    kept = None if found is None else _parsed(found)
    if kept is not None:
        return kept
    made = compile_now()
    try:
        write(path, made)
    except OSError as error:
        cache_folder.tell(path, error)
    return made


def write(path: Path, made: Cubin) -> None:
    """Write a kernel. Args: path: see `path_of`.

    Raises:
        OSError: it cannot be written, or others can write its folder.
    """
    cache_folder.write(path, _record(made))


def _record(made: Cubin) -> bytes:
    record = {
        "code": made.code.hex(),
        "entry": made.entry,
        "registers": made.registers,
        "local_bytes": made.local_bytes,
        "shared_bytes": made.shared_bytes,
    }
    return json.dumps({**record, "sha256": _digest(record)}).encode()


def _parsed(text: bytes) -> Cubin | None:
    # None if the record is damaged: the kernel is then compiled again. Machine code with a flipped
    # bit must not run.
    from cswap_kernels.cuda.compiler import Cubin

    try:
        record = parse_object(text, "kernel")
        if record.pop("sha256", None) != _digest(record):
            return None
        return Cubin(bytes.fromhex(record.pop("code")), **record)
    except (ValueError, KeyError, TypeError):  # a ConfigError is a ValueError
        return None


def _digest(record: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
