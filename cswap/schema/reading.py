"""The only reader of JSON: cswap reads every JSON file and text here.

Size, depth and numbers are bounded, so that no file can exhaust memory, the stack or a float. The
reader refuses input that JSON does not define clearly: duplicate keys, NaN and Infinity, and all
encodings but UTF-8. The caller checks the content of the object (`cswap.schema.checks`).
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, Final, NoReturn

from cswap.display import short, shown
from cswap.errors import ConfigError

MOST_BYTES: Final = 256 << 20
"""Largest size of a file. A trace of a million operators is smaller."""

MOST_DEPTH: Final = 32
"""Largest depth of nested objects and lists. Files of cswap have at most eight levels."""

MOST_DIGITS: Final = 19
"""Most digits of an integer: as many as 2**63 has. Larger numbers are written as floats."""


def read_object(
    source: object, name: str, error: type[ConfigError] = ConfigError, *, most: int = MOST_BYTES
) -> dict[str, Any]:
    """Read the object in a JSON file, or in JSON text, which begins with a brace.

    Args:
        source: the path or the text.
        name: name of the argument, for messages.
        error: class of the error to raise.
        most: largest number of bytes of a file.

    Raises:
        ConfigError: of class ``error``: the source cannot be read, or is not a JSON object.

    >>> read_object('{"a": [1, 2.5]}', "plan")
    {'a': [1, 2.5]}
    >>> read_object('{"a": 1, "a": 2}', "plan")
    Traceback (most recent call last):
    ...
    cswap.errors.ConfigError: plan='{"a": 1, "a": 2}': is not JSON (the key 'a' occurs twice).
    """
    if not isinstance(source, str | os.PathLike) or not isinstance(text := os.fspath(source), str):
        raise error(f"{name}={shown(source)}: must be JSON text or a path.")
    where = f"{name}={shown(text)}"
    if text.lstrip().startswith("{"):
        return parse_object(text, where, error)
    try:
        data = read_bytes(text, most)
    except (OSError, ValueError) as reason:
        raise error(f"{where}: cannot be read ({short(_words(reason))}).") from reason
    return parse_object(data, where, error)


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Read the bytes of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has more than ``most`` bytes, or the path is not a valid path.
    """
    with open(path, "rb") as file:  # noqa: PTH123 - its error for a path with a NUL is clearer
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most} bytes")
    return data


def parse_object(
    text: str | bytes, where: str, error: type[ConfigError] = ConfigError
) -> dict[str, Any]:
    """Parse the object of a JSON text.

    Args:
        text: JSON text; bytes must be UTF-8.
        where: begin of every message.
        error: class of the error to raise.

    Raises:
        ConfigError: of class ``error``: the text is not a JSON object, or exceeds the bounds of
            this module.
    """
    try:
        plain = text.decode("utf-8") if isinstance(text, bytes) else text
    except UnicodeDecodeError as reason:
        raise error(f"{where}: is not UTF-8 text (byte {reason.start}).") from reason
    try:
        found = _decoder.decode(plain)
    except ValueError as reason:
        raise error(f"{where}: is not JSON ({reason}).") from reason
    except RecursionError:
        raise error(f"{where}: {_DEEP}") from None
    if not isinstance(found, dict):
        raise error(f"{where}: must be a JSON object, not {_KINDS.get(type(found), 'a number')}.")
    if _depth(found) > MOST_DEPTH:
        raise error(f"{where}: {_DEEP}")
    return found


_DEEP: Final = f"has more than {MOST_DEPTH} objects or lists in one another."

_KINDS: Final = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}


def _words(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return found


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"the integer {short(digits)} has more than {MOST_DIGITS} digits")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {short(digits)} is beyond a float's range")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _depth(value: Any) -> int:
    # Level by level, because recursion into a deeply nested value could exhaust the stack.
    level, depth = [value], 0
    while level and depth <= MOST_DEPTH:
        depth += 1
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, dict | list)
        ]
    return depth


_decoder: Final = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_constant
)
