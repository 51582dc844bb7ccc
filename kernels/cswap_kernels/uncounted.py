"""Arrays in compiled loops without Numba's reference counts.

Note [uncounted arrays]
~~~~~~~~~~~~~~~~~~~~~~~
When compiled code reads an array from a tuple, Numba counts a reference. In a loop that reads a few
numbers per array, the counting takes longer than everything else. LLVM removes it where an array
has no counter, if all functions of the loop are inlined (``forceinline``).

Nothing keeps an uncounted array alive. So a function calls `uncounted` only with its own argument,
which its caller holds. Numba frees a local variable after its last use, which would be this call.
"""

from __future__ import annotations

from typing import Any, TypeVar

from numba.core import cgutils
from numba.extending import intrinsic, overload

from cswap_kernels.jit import njit

inlined = njit(nogil=True, forceinline=True)
"""Compiles functions of such a loop."""

_Arrays = TypeVar("_Arrays", bound="tuple[Any, ...]")


def uncounted(arrays: _Arrays) -> _Arrays:
    """A tuple of the same arrays without counters."""
    return arrays


@overload(uncounted, jit_options={"forceinline": True})
def _uncounted(arrays: Any) -> Any:
    del arrays

    def compiled(arrays: Any) -> Any:
        return _without_counters(arrays)

    return compiled


@intrinsic
def _without_counters(typing: Any, arrays: Any) -> Any:
    del typing

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        changed = []
        for array, value in zip(arrays, cgutils.unpack_tuple(builder, args[0]), strict=True):
            struct = context.make_array(array)(context, builder, value=value)
            struct.meminfo = cgutils.get_null_value(struct.meminfo.type)
            changed.append(struct._getvalue())  # noqa: SLF001 Numba has no other name for it
        return context.make_tuple(builder, signature.return_type, changed)

    return arrays(arrays), emit
