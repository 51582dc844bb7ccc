"""Units for readers."""

from __future__ import annotations

import math
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB")


def show_bytes(n: float, *, up: bool = False) -> str:
    """Bytes for a reader.

    Args:
        n: bytes.
        up: whether to round up.

    >>> show_bytes(1536), show_bytes(1540), show_bytes(1540, up=True)
    ('1.5 KiB', '1.5 KiB', '1.6 KiB')
    """
    power = 0
    while n >= 1024 and power < len(_UNITS) - 1:
        n, power = n / 1024, power + 1
    digits = min(power, 1)
    if up:
        n = math.ceil(n * 10**digits) / 10**digits
    return f"{n:.{digits}f} {_UNITS[power]}"
