"""`cswap explain`: the decisions in a file that an engine wrote, as a table."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from cswap.display import shown
from cswap.errors import ConfigError
from cswap.schema.checks import MOST_RATE, Checks
from cswap.schema.reading import read_object
from cswap.stats.stats_file import FORMAT, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

COLUMNS = (
    *("#", "saved in", "MiB", "zeros", "codec", "ratio"),
    *("predicted us", "measured us", "regret us", "why"),
)
DROPPED: Final = ("regret us", "predicted us", "measured us", "zeros", "MiB", "ratio")
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

_CHECK: Final = Checks(ConfigError)


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


def site_rows(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row per call site, of `COLUMNS`."""
    for site in record["sites"]:
        profile, measured = site.get("profile") or {}, _measured(site)
        chosen = next((c for c in site["candidates"] if c["codec"] == site["codec"]), None)
        yield (
            str(site["position"]),
            site["saved_in"],
            f"{profile['nbytes'] / 2**20:.2f}" if profile else "",
            f"{profile['zero_fraction']:.0%}" if profile else "",
            site["codec"],
            f"{measured['ratio']:.2f}" if measured else "",
            _us(chosen and chosen["cost_s"]),
            _us(site.get("measured_cost_s")),
            _us(site.get("regret_s")),
            site["reason"],
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
                f"{c['ratio']:.2f}",
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
    return (
        f"{len(sites)} call sites, {len(swapped)} swapped; "
        f"regret {1e6 * sum(regrets):.0f} us per step over {len(regrets)} measured ones{share}."
    )


def notes(record: dict[str, Any]) -> list[str]:
    """Reasons why little memory was saved, one line each; empty for files of older versions."""
    return list(record.get("notes", ()))


def _measured(site: dict[str, Any]) -> dict[str, Any] | None:
    return next((m for m in site["measured"] if m["codec"] == site["codec"]), None)


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.1f}"
