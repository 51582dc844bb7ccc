"""HOME's networks taken together: a published mean beside our mean, "up to" beside our maximum."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from bench.papers.home import WHY, WHY_SPEED
from bench.papers.published import HOME_MEANS, HOME_MOST, HOME_SPEED
from bench.papers.row import MAXIMUM, MEAN, SIMULATED, UP_TO, Row

if TYPE_CHECKING:
    from collections.abc import Iterable

SYSTEM: Final = "HOME means"
OTHERS: Final = {"none": "PyTorch", "capuchin": "Capuchin"}
Fields = dict[str, Any]


def means(rows: Iterable[Fields]) -> list[Fields]:
    """Rows over all networks.

    Args:
        rows: the finished rows of all cells, as plain data.
    """
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        if row["system"] == "HOME" and row["ours"] is not None:
            by_kind.setdefault(row["details"]["kind"], []).append(row["ours"])
    if not by_kind:
        return []
    found = []
    for other, name in OTHERS.items():
        ours = by_kind[f"over {other}"]
        mean = (statistics.fmean(ours), MEAN)
        most = (max(ours), MAXIMUM)
        what = f"largest batch over {name}'s"
        found.append(_row(f"mean of {what}", HOME_MEANS[other], MEAN, mean, len(ours), WHY))
        found.append(_row(f"maximum of {what}", HOME_MOST[other], UP_TO, most, len(ours), WHY))
    for policy, published in HOME_SPEED.items():
        ours = by_kind.get(f"speed over {policy}", [])
        if ours:
            what = f"maximum of throughput over {policy}"
            most = (max(ours), MAXIMUM)
            found.append(_row(what, published, UP_TO, most, len(ours), WHY_SPEED[policy]))
    return [row.to_dict() for row in found]


def _row(
    what: str, published: float, published_is: str, ours: tuple[float, str], n: int, why: str
) -> Row:
    protocol = f"over {n} networks, of the rows below"
    value, kind = ours
    return Row(
        SYSTEM, what, "x", published, value, protocol, why, published_is, f"{kind}, {SIMULATED}"
    )
