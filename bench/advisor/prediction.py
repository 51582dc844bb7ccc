"""Errors of ratios that are predicted from a sample."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from cswap.advisor.candidates import predicted_ratio
from cswap.profiler import profile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.advisor.recording import Recording
    from bench.advisor.truth import Outcome


def errors(
    recording: Recording, outcomes: Sequence[Mapping[str, Outcome]]
) -> dict[str, list[float]]:
    """By codec, the relative error of the predicted ratio of every tensor that it takes."""
    found: dict[str, list[float]] = {}
    for x, of in zip(recording.tensors, outcomes, strict=True):
        taken = profile(x)
        for name, outcome in of.items():
            true = max(1.0, x.nbytes / outcome.nbytes)
            found.setdefault(name, []).append(predicted_ratio(name, taken) / true - 1)
    return found


def summary(by_model: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """By codec, over all models: median and largest absolute relative error, number of tensors."""
    names = sorted({name for errors_ in by_model.values() for name in errors_})
    found = {}
    for name in names:
        values = [abs(e) for errors_ in by_model.values() for e in errors_.get(name, ())]
        found[name] = {
            "median": statistics.median(values),
            "largest": max(values),
            "tensors": float(len(values)),
        }
    return found
