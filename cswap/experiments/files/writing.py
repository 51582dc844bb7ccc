"""Writes files whole or not at all."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from cswap.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, document: dict[str, Any]) -> None:
    """Write strict JSON (a number that is not finite becomes null), whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json.dumps(_finite(document), indent=1, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write a text and a line's end, whole or not at all; its folder is made if there is none.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{str(path)!r}: cannot be written ({error.strerror}).") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
