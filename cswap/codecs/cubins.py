"""Keeps the machine code of CUDA kernels on disk, because compiling one takes a second or more.

The code is in the cache folder, or in the file that the environment variable CSWAP_KERNELS names.
``python -m bench gpu build`` makes such a file on any machine: a zip archive with one record per
kernel. The archive's comment is the digest of the sources. Kernels of other sources are not used.

Note [who may write the cache] explains which files are trusted.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cswap import cache_folder
from cswap.errors import ConfigError
from cswap.log import log
from cswap.schema.reading import parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cswap_kernels.cuda.compiler import Cubin

VARIABLE: Final = "CSWAP_KERNELS"
"""Environment variable that names a file with kernels."""


def key(name: str, threads: int) -> str:
    """The key of a kernel that is compiled for blocks of this number of threads.

    >>> key("zvc+int8-4-encode", 256)
    'zvc_int8-4-encode-256'
    """
    return f"{name}-{threads}".replace("+", "_")


def cached(name: str, architecture: int, compile_now: Callable[[], Cubin]) -> Cubin:
    """Return a kernel from CSWAP_KERNELS or the cache folder; else compile it and store it there.

    A cache that cannot be read or written is ignored, with one message in the log.

    Raises:
        ConfigError: CSWAP_KERNELS names a file that has no kernels, or that others may write.
    """
    from cswap_kernels.cuda.compiler import fingerprint

    shipped = _from_file(_member(name, architecture))
    if shipped is not None:
        return shipped
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
    """The folder of compiled kernels."""
    return cache_folder.root() / "kernels"


def write_file(path: Path, kernels: Mapping[tuple[str, int], Cubin]) -> None:
    """Write kernels by (`key`, architecture) as a file for CSWAP_KERNELS."""
    from cswap_kernels.cuda.compiler import sources

    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = sources().encode()
        for (name, architecture), made in sorted(kernels.items()):
            archive.writestr(_member(name, architecture), _record(made))
    path.write_bytes(memory.getvalue())
    path.chmod(0o600)  # a file that others may write is refused, see cache_folder.py


def _member(name: str, architecture: int) -> str:
    return f"{name}-sm_{architecture}.json"


def _from_file(member: str) -> Cubin | None:
    path = os.environ.get(VARIABLE)
    archive = _opened(path) if path else None
    if archive is None or member not in archive.namelist():
        return None
    return _parsed(archive.read(member))


@cache
def _opened(path: str) -> zipfile.ZipFile | None:
    # None if its kernels were built from other sources than this package's.
    from cswap_kernels.cuda.compiler import sources

    data = cache_folder.read(Path(path).expanduser().absolute())
    remedy = "Remedy: python -m bench gpu build --out FILE, in a folder that only you can write."
    if data is None:
        why = "no such file, or others may write it or its folder"
        raise ConfigError(f"{VARIABLE}={path!r}: {why}. {remedy}")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile:
        raise ConfigError(f"{VARIABLE}={path!r}: not a file with kernels. {remedy}") from None
    if archive.comment != sources().encode():
        log.warning(
            "%s=%r: kernels of another version of cswap, not used. %s", VARIABLE, path, remedy
        )
        return None
    return archive


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
