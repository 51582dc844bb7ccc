"""The shares of zeros at which another sparse codec becomes better, from the sparsity sweep."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CODECS: Final = ("zvc", "csr", "rle")
PAIRS: Final = tuple(combinations(CODECS, 2))
QUANTITIES: Final = ("ratio", "encode", "decode")

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Time or encoded size of a codec at one share of zeros; less is better.

    Attributes:
        low: 20 % quantile of a time; of an encoded size the value itself.
        mid: median.
        high: 80 % quantile.
    """

    low: float
    mid: float
    high: float


@dataclass(frozen=True, slots=True)
class Crossover:
    """A share of zeros at which two codecs change places.

    Attributes:
        dtype: dtype of the sweep.
        data: arrangement of its zeros.
        quantity: one of QUANTITIES.
        below: codec that is better with fewer zeros.
        above: codec that is better with more.
        zeros: share of zeros, interpolated.
        value: ratio, or GB/s of raw bytes, of both codecs there.
    """

    dtype: str
    data: str
    quantity: str
    below: str
    above: str
    zeros: float
    value: float

    @property
    def pair(self) -> tuple[str, str]:
        """The two codecs in the order of `PAIRS`."""
        pair = self.below, self.above
        return pair if pair in PAIRS else pair[::-1]


def sweeps(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Rows]]:
    """The sparsity sweep's rows by (dtype, data), then by codec, in the order of zeros."""
    found: dict[tuple[str, str], dict[str, Rows]] = {}
    rows = [r for r in document["rows"] if r.get("family") == "sparsity"]
    for row in sorted(rows, key=lambda r: r["zeros"]):
        group = found.setdefault((row["dtype"], row["data"]), {})
        group.setdefault(row["codec"], []).append(row)
    return found


def crossovers(document: dict[str, Any]) -> list[Crossover]:
    """All of them, in the order of sweeps, quantities and pairs."""
    return [
        found
        for (dtype, data), by_codec in sweeps(document).items()
        for quantity in QUANTITIES
        for pair in PAIRS
        if all(codec in by_codec for codec in pair)
        for found in _of_pair(dtype, data, quantity, pair, by_codec)
    ]


def _of_pair(
    dtype: str, data: str, quantity: str, pair: tuple[str, str], by_codec: dict[str, Rows]
) -> Iterator[Crossover]:
    shares = [row["zeros"] for row in by_codec[pair[0]]]
    a, b = ([_cost(row, quantity) for row in by_codec[codec]] for codec in pair)
    nbytes = by_codec[pair[0]][0]["nbytes"]
    for zeros, cost, a_first in crossings(shares, a, b):
        below, above = pair if a_first else pair[::-1]
        value = 1 / cost if quantity == "ratio" else nbytes / cost / 1e9
        yield Crossover(dtype, data, quantity, below, above, zeros, value)


def _cost(row: dict[str, Any], quantity: str) -> Cost:
    # Bytes, not ratios: with random zeros they are linear in the share of zeros.
    if quantity == "ratio":
        return Cost(*[1 / row["ratio"]] * 3)
    times = row[quantity]
    return Cost(times["low_s"], times["median_s"], times["high_s"])


def crossings(
    x: Sequence[float], a: Sequence[Cost], b: Sequence[Cost]
) -> Iterator[tuple[float, float, bool]]:
    """Yield the points at which the lower one of two curves becomes the higher one.

    Points at which the ranges overlap decide nothing: a change counts between two points where the
    curves are clearly apart. It lies where their medians, joined by lines, first meet in between.

    Args:
        x: ascending.
        a: one curve at these x.
        b: the other.

    Yields:
        x, the height, and whether a is the lower one before.

    >>> flat, rising = [Cost(2, 2, 2)] * 2, [Cost(1, 1, 1), Cost(5, 5, 5)]
    >>> list(crossings([0.0, 1.0], rising, flat))
    [(0.25, 2.0, True)]
    """
    signs = [
        -1 if p.high < q.low else 1 if q.high < p.low else 0 for p, q in zip(a, b, strict=True)
    ]
    clear = [i for i, sign in enumerate(signs) if sign]
    for i, j in pairwise(clear):
        if signs[i] != signs[j]:
            yield (*_meeting(x, a, b, i, j), signs[i] < 0)


def _meeting(
    x: Sequence[float], a: Sequence[Cost], b: Sequence[Cost], first: int, last: int
) -> tuple[float, float]:
    gaps = [p.mid - q.mid for p, q in zip(a, b, strict=True)]
    k = next(k for k in range(first, last) if gaps[k] * gaps[k + 1] <= 0)
    part = gaps[k] / (gaps[k] - gaps[k + 1])
    return x[k] + part * (x[k + 1] - x[k]), a[k].mid + part * (a[k + 1].mid - a[k].mid)
