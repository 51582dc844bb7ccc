"""An engine's statistics and decisions as plain data, for a file that `cswap explain` reads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cswap.advisor.memory import Explanation
    from cswap.engine.stats import Stats

FORMAT: Final = "cswap-stats"
VERSION: Final = 1


def make_record(stats: Stats, explanations: list[Explanation]) -> dict[str, Any]:
    """JSON-ready: {"format", "version", "cswap", "stats", "notes", "sites"}."""
    import cswap

    return {
        "format": FORMAT,
        "version": VERSION,
        "cswap": cswap.__version__,
        "stats": stats.to_dict(),
        "notes": stats.notes(),
        "sites": [_site(e) for e in explanations],
    }


def _site(e: Explanation) -> dict[str, Any]:
    where = e.site.scope or e.site.operator or e.site.producer or "-"
    derived = {"measured_cost_s": e.measured_cost_s, "regret_s": e.regret_s}
    return {**dataclasses.asdict(e), "saved_in": where, **derived}
