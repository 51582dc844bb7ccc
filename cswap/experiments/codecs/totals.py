"""Totals of each codec over all of the user's own tensors, and the best codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cswap.experiments.codecs.contenders import BLOSC, MEMCPY
from cswap.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Rows = list[dict[str, Any]]
    """Of a result file."""

EACH: Final = "best of each row"
"""Name of the total in which every data set has its own best lossless codec."""

NEARLY: Final = 0.9
"""The best codec is the fastest that saves this share of the most bytes that any codec saves."""


@dataclass(frozen=True, slots=True)
class Total:
    """One codec on one data set or on all.

    Attributes:
        codec: name, a peer's, or `EACH`.
        lossless: whether every bit comes back.
        nbytes: raw bytes.
        encoded_bytes: bytes of the encodings.
        encode_s: seconds to encode them one after the other.
        decode_s: seconds to decode them.
    """

    codec: str
    lossless: bool
    nbytes: int
    encoded_bytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Raw over encoded bytes."""
        return self.nbytes / self.encoded_bytes

    @property
    def seconds(self) -> float:
        """To encode and to decode."""
        return self.encode_s + self.decode_s


def by_data_set(rows: Rows) -> dict[tuple[str, str], list[Total]]:
    """A total per codec, for each data set and dtype of a result file's rows."""
    found: dict[tuple[str, str], list[Total]] = {}
    for r in rows:
        n = r["saved_bytes" if "saved_bytes" in r else "nbytes"]  # older files have no samples
        speed = n / 1e9 / r["encode_gb_per_s"], n / 1e9 / r["decode_gb_per_s"]
        total = Total(r["codec"], r["lossless"], n, n / r["ratio"], *speed)
        found.setdefault((r["data"], r["dtype"]), []).append(total)
    return found


def totals(rows: Rows) -> list[Total]:
    """A total per codec over all data sets, and `EACH`.

    A data set that a codec does not take stays as it is.
    """
    groups = list(by_data_set(rows).values())
    by_codec = [{total.codec: total for total in group} for group in groups]
    stay = [Total("", True, group[0].nbytes, group[0].nbytes) for group in groups]
    found = [
        _sum(codec, [mine.get(codec, raw) for mine, raw in zip(by_codec, stay, strict=True)])
        for codec in dict.fromkeys(row["codec"] for row in rows)
    ]
    chosen = [best(g, lossless=True) or raw for g, raw in zip(groups, stay, strict=True)]
    return [*found, _sum(EACH, chosen)] if len(groups) > 1 else found


def _sum(codec: str, parts: Sequence[Total]) -> Total:
    return Total(
        codec,
        all(part.lossless for part in parts),
        sum(part.nbytes for part in parts),
        sum(part.encoded_bytes for part in parts),
        sum(part.encode_s for part in parts),
        sum(part.decode_s for part in parts),
    )


def best(found: Iterable[Total], *, lossless: bool) -> Total | None:
    """The fastest codec that saves nearly as much as any; None if none saves anything."""
    mine = [
        t
        for t in found
        if t.lossless == lossless and t.ratio > 1 and t.codec not in (MEMCPY, BLOSC, EACH)
    ]
    least = max((t.nbytes - t.encoded_bytes for t in mine), default=0) * NEARLY
    return min(
        (t for t in mine if t.nbytes - t.encoded_bytes >= least),
        key=lambda t: t.seconds,
        default=None,
    )


def verdict(rows: Rows) -> Iterator[str]:
    """The best codec on all data sets together: a line each for lossless and lossy ones."""
    found = totals(rows)
    for lossless, kind in ((True, "lossless"), (False, "lossy")):
        one = best(found, lossless=lossless)
        if one is not None:
            yield (
                f"Best for your model, {kind}: {one.codec}. {show_bytes(one.nbytes)} become "
                f"{show_bytes(one.encoded_bytes)} (ratio {one.ratio:.2f}) in "
                f"{1e3 * one.encode_s:.1f} ms, and come back in {1e3 * one.decode_s:.1f} ms."
            )
        elif any(t.lossless == lossless for t in found if t.codec not in (MEMCPY, BLOSC, EACH)):
            yield f"Best for your model, {kind}: none. No {kind} codec makes it smaller."
