"""An engine's statistics and decisions as plain data, for a file that `cswap explain` reads."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cswap.advisor.site_history import Explanation
    from cswap.stats.stats import Stats

FORMAT: Final = "cswap-stats"
VERSION: Final = 1


def make_record(stats: Stats, explanations: list[Explanation]) -> dict[str, Any]:
    """JSON-ready: {"format", "version", "cswap", "stats", "notes", "sites"}."""
    import cswap

    record = {
        "format": FORMAT,
        "version": VERSION,
        "cswap": cswap.__version__,
        "stats": stats.to_dict(),
        "notes": stats.notes(),
        "sites": [_site(e) for e in explanations],
    }
    return {name: _finite(value) for name, value in record.items()}


def _finite(value: Any) -> Any:
    # JSON has neither infinity nor NaN. The guard's errors can be either, and become null.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def _site(e: Explanation) -> dict[str, Any]:
    where = e.site.scope or e.site.operator or e.site.producer or "-"
    derived = {"nbytes": e.nbytes, "measured_cost_s": e.measured_cost_s, "regret_s": e.regret_s}
    return {**dataclasses.asdict(e), "saved_in": where, **derived}
