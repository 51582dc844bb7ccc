"""CSwap+'s networks taken together: means, maxima and ranks, each beside the published one.

A published mean stands beside our mean, "up to" beside our maximum. Networks are ranked, too: a
mean can agree where no network does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.papers.cswap import FITTED, WHY_DENSE, WHY_SPARSE
from bench.papers.published import LATENCY_CUT, MEAN_GAIN, MOST_OVER_SC, OVER_SC
from bench.papers.row import MAXIMUM, MEAN, NONE, SIMULATED, UP_TO, Row

if TYPE_CHECKING:
    from collections.abc import Iterable

SYSTEM: Final = "CSwap+ means"
Fields = dict[str, Any]


def means(rows: Iterable[Fields]) -> list[Fields]:
    """Rows over all networks of a data set, machine and activation.

    Args:
        rows: the finished rows of all cells, as plain data.
    """
    groups: dict[tuple[str, str, str], list[Fields]] = {}
    for row in rows:
        if row["system"] == "CSwap+" and row["details"].get("kind") == "gain":
            d = row["details"]
            groups.setdefault((d["dataset"], d["gpu"], d["activation"]), []).append(row)
    return [row.to_dict() for key, group in groups.items() for row in _Group(key, group).rows()]


class _Group:
    def __init__(self, key: tuple[str, str, str], rows: list[Fields]) -> None:
        self._dataset, self._gpu, self._activation = key
        self._key = key
        self._rows = rows
        self._ours = np.array([row["ours"] for row in rows])
        self._theirs = np.array([row["published"] for row in rows])

    def rows(self) -> list[Row]:
        return [*self._times(), *self._gains(), *self._over_sc(), *self._latency(), *self._checks()]

    def _times(self) -> list[Row]:
        theirs, ours = (100 * (np.mean(1 / gains) - 1) for gains in (self._theirs, self._ours))
        return [self._row("time_mean", "mean training time", theirs, ours, "mean of bars", MEAN)]

    def _gains(self) -> list[Row]:
        text = MEAN_GAIN.get(self._key)
        theirs, ours = (100 * (gains - 1) for gains in (self._theirs, self._ours))
        return [
            self._row(
                *("gain_mean", "mean gain of throughput"),
                *(float(theirs.mean()) if text is None else text, ours.mean()),
                *("mean of bars" if text is None else MEAN, MEAN),
            ),
            self._row(
                *("gain_maximum", "largest gain of throughput", theirs.max(), ours.max()),
                *(f"{MAXIMUM} of bars", MAXIMUM),
            ),
        ]

    def _over_sc(self) -> list[Row]:
        ours = 100 * (self._details("over_sc") - 1)
        machine = self._gpu == "2080ti"
        return [
            self._row(
                *("sc_mean", "mean gain over SC", OVER_SC[self._activation][machine], ours.mean()),
                *(f"{MEAN} over both data sets", MEAN),
            ),
            self._row(
                *("sc_maximum", "largest gain over SC"),
                *(MOST_OVER_SC[self._activation][machine], ours.max()),
                *(f"{UP_TO}, over both data sets", MAXIMUM),
            ),
        ]

    def _latency(self) -> list[Row]:
        ours = 100 * self._details("swap_latency_cut")
        most = LATENCY_CUT.get((self._activation, self._gpu))
        kind = NONE if most is None else UP_TO
        return [
            self._row(
                "cut_maximum", "largest cut of swap latency", most, ours.max(), kind, MAXIMUM
            ),
            self._row("cut_mean", "mean cut of latency", None, ours.mean(), NONE, MEAN),
        ]

    def _checks(self) -> list[Row]:
        from scipy import stats

        rank = float(stats.spearmanr(self._theirs, self._ours).statistic)
        plain = 100 * (self._details("at_profile_rate") - 1)
        return [
            self._row(
                "rank",
                "ranks of the networks' gains, Spearman's rho",
                None,
                rank,
                NONE,
                f"over {len(self._rows)} networks",
                unit="rho",
            ),
            self._row(
                "gain_at_profile_rate",
                "mean gain of throughput at the profile's codec rate",
                None,
                plain.mean(),
                NONE,
                MEAN,
                fitted="",
            ),
        ]

    def _details(self, key: str) -> Any:
        return np.array([row["details"][key] for row in self._rows])

    def _row(
        self,
        quantity: str,
        what: str,
        published: Any,
        ours: Any,
        published_is: str,
        ours_is: str,
        *,
        unit: str = "%",
        fitted: str = FITTED,
    ) -> Row:
        dataset, gpu, activation = self._key
        return Row(
            SYSTEM,
            f"{dataset}, {gpu}, {activation}: {what}",
            unit,
            None if published is None else float(published),
            float(ours),
            f"{len(self._rows)} networks, against vDNN unless the quantity says otherwise",
            WHY_SPARSE if activation == "relu" else WHY_DENSE,
            published_is,
            f"{ours_is}, {SIMULATED}",
            fitted,
            {"dataset": dataset, "gpu": gpu, "activation": activation, "quantity": quantity},
        )
