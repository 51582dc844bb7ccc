"""Targets, against result files. A missed target is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MIB: Final = 1 << 20
LARGE: Final = 64 * MIB
"""From here on a swap should be within 10 % of its bound."""

Documents = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Target:
    """One figure that was aimed at.

    Attributes:
        name: of the figure.
        part: whose rows it is taken from.
        wanted: the figure.
        measured: takes it from the rows of that part; None if they do not have it.
        at_most: whether less is better.
    """

    name: str
    part: str
    wanted: float
    measured: Callable[[list[dict[str, Any]]], float | None]
    at_most: bool = False

    def line(self, documents: Documents) -> str:
        """Say in one line whether it was met."""
        found = self.measured(documents.get(self.part, []))
        sign = "<=" if self.at_most else ">="
        if found is None:
            return f"not measured: {self.name} ({sign} {self.wanted:g})"
        met = found <= self.wanted if self.at_most else found >= self.wanted
        return f"{'met' if met else 'MISSED'}: {self.name} {found:.4g} ({sign} {self.wanted:g})"


def _rate(
    codec: str, direction: str, data: str, dtype: str
) -> Callable[[list[dict[str, Any]]], float | None]:
    def find(rows: list[dict[str, Any]]) -> float | None:
        fitting = [r for r in rows if (r["codec"], r["data"], r["dtype"]) == (codec, data, dtype)]
        return max((r[f"{direction}_gb_per_s"] for r in fitting), default=None)

    return find


def _less(
    ways: Iterable[str], data: str, dtype: str
) -> Callable[[list[dict[str, Any]]], float | None]:
    names = [f"cswap {way}" for way in ways]

    def find(rows: list[dict[str, Any]]) -> float | None:
        fitting = [
            r["less_than_copy"]
            for r in rows
            if r["way"] in names and (r["data"], r["dtype"]) == (data, dtype)
            if r["nbytes"] >= LARGE
        ]
        return max(fitting, default=None)

    return find


def _worst_of_bound(rows: list[dict[str, Any]]) -> float | None:
    found = [r["of_bound"] for r in rows if r["nbytes"] >= LARGE and r["of_bound"] is not None]
    return max(found, default=None)


def _host_us(rows: list[dict[str, Any]]) -> float | None:
    # Of the smallest tensors: large ones go in sections, each at a cost of its own.
    ours = [r for r in rows if r["way"].startswith("cswap")]
    least = min((r["nbytes"] for r in ours), default=0)
    return max((r["host_us"] for r in ours if r["nbytes"] == least), default=None)


def _vgg(rows: list[dict[str, Any]], methods: Iterable[str]) -> float | None:
    found = [
        r["step_ms"]
        for r in rows
        if r["model"] == "VGG-16" and r["method"] in methods and r["step_ms"] is not None
    ]
    return min(found, default=None)


def _vgg_over(
    rows: list[dict[str, Any]], above: Iterable[str], below: Iterable[str]
) -> float | None:
    over, under = _vgg(rows, above), _vgg(rows, below)
    return None if over is None or under is None else over / under


EXACT: Final = ("cswap lossless", "cswap raw")

TARGETS: Final = (
    Target("zvc encode, GB/s", "codecs", 1300, _rate("zvc", "encode", "relu-85", "float32")),
    Target("zvc decode, GB/s", "codecs", 1500, _rate("zvc", "decode", "relu-85", "float32")),
    Target("expk encode, GB/s", "codecs", 1000, _rate("expk", "encode", "normal", "bfloat16")),
    Target("expk decode, GB/s", "codecs", 1800, _rate("expk", "decode", "normal", "bfloat16")),
    Target("int8 encode, GB/s", "codecs", 1800, _rate("int8", "encode", "normal", "float32")),
    Target("int8 decode, GB/s", "codecs", 2000, _rate("int8", "decode", "normal", "float32")),
    Target("fp8 encode, GB/s", "codecs", 1800, _rate("fp8", "encode", "normal", "float32")),
    Target("fp8 decode, GB/s", "codecs", 2000, _rate("fp8", "decode", "normal", "float32")),
    Target("less time, 85 % zeros, %", "swap", 75, _less(["zvc"], "relu-85", "float32")),
    Target("less time, dense float32, %", "swap", 70, _less(["int8", "fp8"], "normal", "float32")),
    Target(
        "less time, dense bfloat16, %", "swap", 45, _less(["int8", "fp8"], "normal", "bfloat16")
    ),
    Target("less time, lossless bfloat16, %", "swap", 25, _less(["expk"], "normal", "bfloat16")),
    Target("worst swap from 64 MiB over its bound", "swap", 1.1, _worst_of_bound, at_most=True),
    Target("busiest host per small tensor, us", "swap", 60, _host_us, at_most=True),
    Target(
        "VGG-16, lossless cswap over oracle, time",
        "training",
        1.1,
        lambda rows: _vgg_over(rows, EXACT, ["no swapping"]),
        at_most=True,
    ),
    Target(
        "VGG-16, save_on_cpu over lossless cswap, time",
        "training",
        1.5,
        lambda rows: _vgg_over(rows, ["save_on_cpu"], EXACT),
    ),
)


def lines(documents: Documents) -> list[str]:
    """One line per target, from the rows by part."""
    return [target.line(documents) for target in TARGETS]
