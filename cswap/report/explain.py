"""`cswap explain`: the decisions in a file that an engine wrote, as a table."""

from __future__ import annotations

import os
import re
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from cswap.display import shown
from cswap.errors import ConfigError
from cswap.schema.checks import MOST_RATE, Checks
from cswap.schema.reading import read_object
from cswap.stats.stats_file import FORMAT, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

COLUMNS = (
    *("#", "saved in", "n", "MiB", "zeros", "codec", "ratio"),
    *("predicted us", "measured us", "next best", "regret us", "why"),
)
DROPPED: Final = (
    "regret us",
    "next best",
    "measured us",
    "predicted us",
    "zeros",
    "ratio",
    "MiB",
    "n",
)
"""Columns that a narrow terminal does without, the first to go first."""

CANDIDATE_COLUMNS = (
    "#",
    "codec",
    "predicted ratio",
    "device us",
    "cost us",
    "measured ratio",
    "us",
)

HELD_NOWHERE: Final = ("keep", "remat", "unread")
"""Choices without an encoding, which have no ratio."""

_CHECK: Final = Checks(ConfigError)

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


def _block(path: str) -> str:
    # A module's path without the numbers of blocks; of nested lists, the last number names a layer.
    *above, last = path.rpartition(".")
    parent = _NUMBER.sub("*", above[0])
    return f"{parent}.{last}" if "*" in parent else _NUMBER.sub("*", path)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of `SwapEngine.save`.

    Raises:
        ConfigError: the file cannot be read, has another kind or version, or a field is wrong (the
            message names it).
    """
    where = f"file={shown(os.fspath(path))}"
    record = read_object(path, "file")
    if record.get("format") != FORMAT:
        raise ConfigError(f"{where}: not written by SwapEngine.save.")
    if (version := record.get("version")) != VERSION or isinstance(version, bool):
        raise ConfigError(f"{where}: version {shown(version)}; this cswap reads {VERSION}.")
    for i, line in enumerate(_CHECK.items(f"{where}: notes", record.get("notes", ()))):
        _CHECK.text(f"{where}: notes[{i}]", line)
    for i, site in enumerate(_CHECK.items(f"{where}: sites", record.get("sites"))):
        _check_site(f"{where}: sites[{i}]", site)
    return record


def _check_site(where: str, value: Any) -> None:
    site = _CHECK.mapping(where, value)
    _CHECK.count(f"{where}.position", site.get("position"))
    for name in ("saved_in", "codec", "reason"):
        _CHECK.text(f"{where}.{name}", site.get(name))
    if site.get("nbytes") is not None:  # older files have none
        _CHECK.count(f"{where}.nbytes", site["nbytes"])
    for name in ("measured_cost_s", "regret_s"):
        if site.get(name) is not None:
            _CHECK.seconds(f"{where}.{name}", site[name])
    if site.get("profile") is not None:
        profile = _CHECK.mapping(f"{where}.profile", site["profile"])
        _CHECK.count(f"{where}.profile.nbytes", profile.get("nbytes"))
        _CHECK.number(f"{where}.profile.zero_fraction", profile.get("zero_fraction"), 0.0, 1.0)
    for name, seconds in (("candidates", ("device_s", "cost_s")), ("measured", ("device_s",))):
        for i, row in enumerate(_CHECK.items(f"{where}.{name}", site.get(name))):
            _check_codec(f"{where}.{name}[{i}]", row, seconds)


def _check_codec(where: str, value: Any, seconds: tuple[str, ...]) -> None:
    row = _CHECK.mapping(where, value)
    _CHECK.text(f"{where}.codec", row.get("codec"))
    _CHECK.number(f"{where}.ratio", row.get("ratio"), 0.0, MOST_RATE)
    for name in seconds:
        _CHECK.seconds(f"{where}.{name}", row.get(name))


def site_rows(record: dict[str, Any], *, blocks: bool = False) -> Iterator[tuple[str, ...]]:
    """A row per call site, of `COLUMNS`.

    Args:
        record: see `load`.
        blocks: one row for like call sites of blocks, whose paths differ in numbers alone: the
            first position, the sum of bytes and of seconds, and the means of shares and ratios.
    """
    like: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for i, site in enumerate(record["sites"]):
        path = _block(site["saved_in"])
        key = (path, site["codec"], site["reason"], _nbytes(site)) if blocks else (i,)
        like.setdefault(key, []).append(site)
    return (_row(sites) for sites in like.values())


def _row(sites: list[dict[str, Any]]) -> tuple[str, ...]:
    first, n = sites[0], len(sites)
    profiles = [profile for site in sites if (profile := site.get("profile"))]
    chosen = [c for s in sites for c in s["candidates"] if c["codec"] == s["codec"]]
    ratios = [found["ratio"] for site in sites if (found := _measured(site))]
    if not ratios and first["codec"] not in HELD_NOWHERE:
        ratios = [c["ratio"] for c in chosen]
    sizes = [size for site in sites if (size := _nbytes(site)) is not None]
    return (
        str(first["position"]),
        first["saved_in"] if n == 1 else _block(first["saved_in"]),
        str(n),
        f"{sum(sizes) / 2**20:.2f}" if sizes else "",
        f"{fmean(p['zero_fraction'] for p in profiles):.0%}" if profiles else "",
        first["codec"],
        f"{fmean(ratios):.2f}" if ratios else "",
        _us(_sum(c["cost_s"] for c in chosen)),
        _us(_sum(site.get("measured_cost_s") for site in sites)),
        _next_best(sites),
        _us(_sum(site.get("regret_s") for site in sites)),
        first["reason"],
    )


def candidate_rows(record: dict[str, Any], position: int) -> Iterator[tuple[str, ...]]:
    """A row per candidate of the call sites at one position, of `CANDIDATE_COLUMNS`.

    Raises:
        ConfigError: there is no such position.
    """
    sites = [site for site in record["sites"] if site["position"] == position]
    if not sites:
        raise ConfigError(f"position={position}: no call site of that number in the file.")
    for site in sites:
        seen = {m["codec"]: m for m in site["measured"]}
        for c in site["candidates"]:
            mark = " <-" if c["codec"] == site["codec"] else ""
            m = seen.get(c["codec"])
            yield (
                str(position),
                c["codec"] + mark,
                "" if c["codec"] in HELD_NOWHERE else f"{c['ratio']:.2f}",
                _us(c["device_s"]),
                _us(c["cost_s"]),
                f"{m['ratio']:.2f}" if m else "",
                _us(m["device_s"] if m and m["device_s"] else None),
            )


def summary(record: dict[str, Any]) -> str:
    """One line: number of call sites, number swapped, and the total regret of the choices."""
    sites = record["sites"]
    swapped = [site for site in sites if site["codec"] != "keep"]
    regrets = [r for site in sites if (r := site.get("regret_s")) is not None]
    costs = [c for site in sites if (c := site.get("measured_cost_s")) is not None]
    share = f", {sum(regrets) / sum(costs):.1%} of their cost" if sum(costs) else ""
    regret = (
        f"; regret {1e6 * sum(regrets):.0f} us per step over {len(regrets)} measured ones{share}"
        if regrets
        else ""
    )
    return f"{len(sites)} call sites, {len(swapped)} swapped{regret}."


def notes(record: dict[str, Any]) -> list[str]:
    """Reasons why little memory was saved, one line each; empty for files of older versions."""
    return list(record.get("notes", ()))


def _measured(site: dict[str, Any]) -> dict[str, Any] | None:
    return next((m for m in site["measured"] if m["codec"] == site["codec"]), None)


def _next_best(sites: list[dict[str, Any]]) -> str:
    # The cheapest other candidate, if it is the same everywhere, and its cost. To keep the tensor
    # counts where nothing else holds fewer bytes.
    others = [[c for c in s["candidates"] if c["codec"] != s["codec"]] for s in sites]
    fewer = [[c for c in some if c["codec"] != "keep"] or some for some in others]
    best = [min(some, key=lambda c: c["cost_s"]) for some in fewer if some]
    names = {c["codec"] for c in best}
    return f"{names.pop()} {_us(_sum(c['cost_s'] for c in best))}" if len(names) == 1 else ""


def _nbytes(site: dict[str, Any]) -> int | None:
    profile = site.get("profile")
    found: int | None = profile["nbytes"] if profile else site.get("nbytes")
    return found


def _sum(seconds: Iterable[float | None]) -> float | None:
    known = [s for s in seconds if s is not None]
    return sum(known) if known else None


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.1f}"
