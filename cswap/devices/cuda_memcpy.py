"""Copies between a device and its host by CuPy's ``cudaMemcpyAsync``, where CuPy is installed.

torch's ``copy_`` needs views of the bytes and the stream as the current one: six calls more for
each copy.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

INFERRED: Final = 4
"""The direction follows from the addresses (cudaMemcpyDefault)."""


@cache
def memcpy_async() -> Callable[[int, int, int, int, int], Any] | None:
    """CuPy's function of target, source, bytes, direction and stream; None: no CuPy."""
    try:
        from cupy.cuda import runtime

        found: Callable[[int, int, int, int, int], Any] = runtime.memcpyAsync
    except Exception:  # whatever is wrong with it, torch serves
        return None
    return found
