"""Units for readers."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB")


def show_bytes(n: float) -> str:
    """Bytes for a reader.

    >>> show_bytes(1536)
    '1.5 KiB'
    """
    power = 0
    while n >= 1024 and power < len(_UNITS) - 1:
        n, power = n / 1024, power + 1
    return f"{n:.{min(power, 1)}f} {_UNITS[power]}"
