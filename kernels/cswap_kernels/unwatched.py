"""Calls that a profiler must not see.

Note [kernels under a profiler]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``torch.profiler`` with ``with_stack=True`` stores the address of the code of each Python function
that ran, and reads the code when its events are requested. Numba generates functions and frees
them, and an import frees a module's top level. Reading freed code fails with a UnicodeDecodeError.
Besides, millions of calls take gigabytes. The profiler does not watch a thread that starts while it
runs. So kernels are compiled, and codecs imported, in such a thread if the caller's thread is
watched. PyTorch's issue: https://github.com/pytorch/pytorch/issues/136040.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


def unwatched(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, in a thread of its own if a profiler watches this one.

    The caller must hold no lock that the function takes.
    """
    if sys.getprofile() is None:
        return call(*args, **kwargs)
    with ThreadPoolExecutor(1, "cswap-unwatched") as thread:
        return thread.submit(call, *args, **kwargs).result()
