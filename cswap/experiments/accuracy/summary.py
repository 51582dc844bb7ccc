"""Summarises runs in a row per model and policy."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import Any, Final

from cswap.experiments.accuracy.latency import raw_s, swap_s
from cswap.experiments.accuracy.verdict import EQUAL, UNDECIDED, interval, verdict
from cswap.plan.hardware import load_hardware

GPUS: Final = ("v100-pcie3", "a100-pcie4", "h200-pcie5")


def summarise(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per model and policy: accuracy over matched seeds, bytes and latency per step."""
    rows = []
    settings = document["settings"]
    for model in settings["models"]:
        runs = [run for run in document["runs"] if run["model"] == model]
        off = {run["seed"]: run for run in runs if run["policy"] == "off"}
        eligible = max((run["eligible_bytes"] for run in runs), default=0.0)
        for policy in settings["policies"]:
            mine = [run for run in runs if run["policy"] == policy]
            if mine:
                about = {"model": model, "policy": policy, "seeds": len(mine)}
                costs = {} if policy == "off" else _against(mine, off, settings, model)
                rows.append({**about, **_row(policy, mine, eligible), **costs})
    return rows


def _against(
    mine: list[dict[str, Any]],
    off: dict[int, dict[str, Any]],
    settings: dict[str, Any],
    model: str,
) -> dict[str, Any]:
    off_mine = [off[run["seed"]] for run in mine]
    losses, off_losses = (_values(runs, "validation_loss") for runs in (mine, off_mine))
    accuracies, off_accuracies = (_values(runs, "accuracy") for runs in (mine, off_mine))
    margin = settings["margins"].get(model)
    bit_equal = all(run["same_bits"] for run in mine)
    if settings["quick"]:
        word = UNDECIDED  # too short to say anything about a policy
    else:
        word = EQUAL if bit_equal else verdict(losses, off_losses, margin)
    return {
        "margin": margin,
        "verdict": word,
        "loss": asdict(interval(losses, off_losses)),
        "accuracy_change": asdict(interval(accuracies, off_accuracies)),
        "seed_spread": statistics.stdev(off_losses) if len(off_losses) > 1 else None,
        "bit_equal": bit_equal,
    }


def _row(policy: str, mine: list[dict[str, Any]], eligible: float) -> dict[str, Any]:
    off = policy == "off"
    return {
        "validation_loss": _mean(mine, "validation_loss"),
        "accuracy": _mean(mine, "accuracy"),
        "eligible_bytes": eligible,
        "held_bytes": eligible if off else _mean(mine, "held_bytes"),
        "simulated_swap": {} if off else {name: _simulated(mine, eligible, name) for name in GPUS},
    }


def _mean(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(_values(runs, key))


def _values(runs: list[dict[str, Any]], key: str) -> list[float]:
    # A file has null for a value that was not finite.
    return [math.nan if run[key] is None else run[key] for run in runs]


def _simulated(runs: list[dict[str, Any]], eligible: float, name: str) -> dict[str, float]:
    # Of a step, with nothing hidden, against raw copies of the same tensors.
    hardware = load_hardware(name)
    mine = statistics.fmean(swap_s(run["by_codec"], eligible, hardware) for run in runs)
    raw = raw_s(eligible, hardware)
    return {"ms": 1e3 * mine, "raw_ms": 1e3 * raw, "reduction": 1 - mine / raw if raw else 0.0}
