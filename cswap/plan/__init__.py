"""Planning: policies of published systems and our own, compared in one simulator. Needs no torch.

The package itself can be called: ``cswap.plan(trace, hardware, budget, policy)`` is
`cswap.plan.planner.plan`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `cswap.plan.planner.plan`."""
        from cswap.plan.planner import plan

        return plan(*args, **options)


sys.modules[__name__].__class__ = _Callable
