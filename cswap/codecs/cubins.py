"""Machine code of CUDA kernels, kept on disk: compiling a kernel takes a second or more.

Who may have written it: see Note [who may write the cache].
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


def cached(name: str, architecture: int, compile_now: Callable[[], Cubin]) -> Cubin:
    """The kernel of that name from the cache folder, else compiled and put there.

    A cache that cannot be read or written is as good as none; the log says so once.
    """
    from cswap_kernels.cuda.compiler import fingerprint

    path = folder() / f"{name}-sm_{architecture}-{fingerprint()}.json"
    found = cache_folder.read(path)
    kept = None if found is None else _parsed(found)
    if kept is not None:
        return kept
    made = compile_now()
    try:
        cache_folder.write(path, _record(made))
    except OSError as error:
        cache_folder.tell(path, error)
    return made


def folder() -> Path:
    """Where compiled kernels are kept."""
    return cache_folder.root() / "kernels"


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
    # None if it is damaged: it is made anew. Machine code with a flipped bit must not run.
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
