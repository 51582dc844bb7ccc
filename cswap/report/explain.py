"""`cswap explain`: the decisions in a file that an engine wrote, as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cswap.engine.record import FORMAT, VERSION
from cswap.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

COLUMNS = (
    *("#", "saved in", "MiB", "zeros", "codec", "ratio"),
    *("predicted us", "measured us", "regret us", "why"),
)
CANDIDATE_COLUMNS = (
    "#",
    "codec",
    "predicted ratio",
    "device us",
    "cost us",
    "measured ratio",
    "us",
)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `SwapEngine.save` wrote.

    Raises:
        ConfigError: the file cannot be read, or is of another kind or version.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"file={str(path)!r}: cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ConfigError(f"file={str(path)!r}: not written by SwapEngine.save.")
    if record.get("version") != VERSION:
        raise ConfigError(
            f"file={str(path)!r}: version {record.get('version')!r}; this cswap reads {VERSION}."
        )
    return record


def site_rows(record: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row per call site, of `COLUMNS`."""
    for site in record["sites"]:
        profile, measured = site["profile"] or {}, _measured(site)
        chosen = next((c for c in site["candidates"] if c["codec"] == site["codec"]), None)
        yield (
            str(site["position"]),
            site["saved_in"],
            f"{profile['nbytes'] / 2**20:.2f}" if profile else "",
            f"{profile['zero_fraction']:.0%}" if profile else "",
            site["codec"],
            f"{measured['ratio']:.2f}" if measured else "",
            _us(chosen and chosen["cost_s"]),
            _us(site["measured_cost_s"]),
            _us(site["regret_s"]),
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
    """Sites, how many have moved, what the choices cost above the best; why little was saved."""
    sites = record["sites"]
    swapped = [site for site in sites if site["codec"] != "keep"]
    regrets = [site["regret_s"] for site in sites if site["regret_s"] is not None]
    costs = [site["measured_cost_s"] for site in sites if site["measured_cost_s"] is not None]
    share = f", {sum(regrets) / sum(costs):.1%} of their cost" if sum(costs) else ""
    line = (
        f"{len(sites)} call sites, {len(swapped)} swapped; "
        f"regret {1e6 * sum(regrets):.0f} us per step over {len(regrets)} measured ones{share}."
    )
    return "\n".join([line, *record.get("notes", ())])  # files of older versions have no notes


def _measured(site: dict[str, Any]) -> dict[str, Any] | None:
    return next((m for m in site["measured"] if m["codec"] == site["codec"]), None)


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e6 * seconds:.1f}"
