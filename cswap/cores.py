"""The cores of the machine that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Number of cores that this process may run on: in a container, often fewer than there are.

    >>> 1 <= usable_cores() <= (os.cpu_count() or 1)
    True
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))
