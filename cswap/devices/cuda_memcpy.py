"""Copies between a device and its host by ``cudaMemcpyAsync``, called with addresses.

torch's ``copy_`` needs views of the bytes and the stream as the current one: six calls more for
each copy.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

INFERRED: Final = 4
"""The direction follows from the addresses (cudaMemcpyDefault)."""


@cache
def memcpy_async() -> Callable[[int, int, int, int, int], Any]:
    """A function of target, source, bytes, direction and stream: CuPy's, else the runtime's own.

    Raises:
        UnsupportedError: neither is there.
    """
    try:
        from cupy.cuda import runtime

        found: Callable[[int, int, int, int, int], Any] = runtime.memcpyAsync
    except Exception:  # whatever is wrong with it, the runtime that torch has loaded serves
        return _of_runtime()
    return found


def _of_runtime() -> Callable[[int, int, int, int, int], None]:
    major = (torch.version.cuda or "0").split(".", maxsplit=1)[0]
    try:
        function = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyAsync
    except (OSError, AttributeError) as error:
        raise UnsupportedError(f"cudaMemcpyAsync: {error}. Remedy: install CuPy.") from None
    function.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    )  # fmt: skip

    def memcpy(target: int, source: int, nbytes: int, direction: int, stream: int) -> None:
        code = function(target, source, nbytes, direction, stream)
        if code:
            raise RuntimeError(f"cudaMemcpyAsync: error {code}")

    return memcpy
