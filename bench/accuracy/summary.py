"""From runs to a row per model and policy."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import Any, Final

from bench.accuracy.latency import codec_s, raw_s, swap_s
from bench.accuracy.statistics import compare
from cswap.plan.hardware import load_hardware

GPUS: Final = ("v100-pcie3", "a100-pcie4", "h200-pcie5")


def summarise(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per model and policy: accuracy over matched seeds, bytes and latency per step."""
    rows = []
    for model in document["settings"]["models"]:
        runs = [run for run in document["runs"] if run["model"] == model]
        off = {run["seed"]: run for run in runs if run["policy"] == "off"}
        eligible = max((run["eligible_bytes"] for run in runs), default=0.0)
        for policy in document["settings"]["policies"]:
            mine = [run for run in runs if run["policy"] == policy]
            if mine:
                rows.append(_row(model, policy, mine, off, eligible))
    return rows


def _row(
    model: str,
    policy: str,
    mine: list[dict[str, Any]],
    off: dict[int, dict[str, Any]],
    eligible: float,
) -> dict[str, Any]:
    pairs = [(run, off[run["seed"]]) for run in mine]
    loss, accuracy = (
        compare(
            [_finite(a[key]) for a, _ in pairs],
            [_finite(b[key]) for _, b in pairs],
            lower_is_better=key == "validation_loss",
        )
        for key in ("validation_loss", "accuracy")
    )
    return {
        "model": model,
        "policy": policy,
        "seeds": len(mine),
        "validation_loss": _mean(mine, "validation_loss"),
        "accuracy": _mean(mine, "accuracy"),
        "loss": asdict(loss),
        "accuracy_change": asdict(accuracy),
        "bit_equal": all(run["same_bits"] for run in mine),
        "eligible_bytes": eligible,
        "held_bytes": _mean(mine, "held_bytes") if policy != "off" else eligible,
        "codec_ms": 1e3 * statistics.fmean(codec_s(run["by_codec"]) for run in mine),
        "simulated_swap": {name: _simulated(mine, eligible, name) for name in GPUS}
        if policy != "off"
        else {},
    }


def _mean(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(_finite(run[key]) for run in runs)


def _finite(value: float | None) -> float:
    # A file has null for what was not finite.
    return math.nan if value is None else value


def _simulated(runs: list[dict[str, Any]], eligible: float, name: str) -> dict[str, float]:
    # Of a step, with nothing hidden, against raw copies of the same tensors.
    hardware = load_hardware(name)
    mine = statistics.fmean(swap_s(run["by_codec"], eligible, hardware) for run in runs)
    raw = raw_s(eligible, hardware)
    return {"ms": 1e3 * mine, "raw_ms": 1e3 * raw, "reduction": 1 - mine / raw if raw else 0.0}
