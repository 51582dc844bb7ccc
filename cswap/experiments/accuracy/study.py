"""The task of an accuracy experiment, its options, and the place of its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cswap.experiments.accuracy.verdict import FEWEST_SEEDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from cswap.experiments.task import Task

QUICK: Final = {"steps": 12, "seeds": 2}


@dataclass(frozen=True, slots=True)
class Study:
    """One experiment.

    Attributes:
        settings: models, policies with "off" first, seeds and margins by model, steps, quick; all
            that decides whether an unfinished run can be continued.
        maker: makes the task of a model; it can be pickled.
        folder: of the results.
        jobs: processes that train.
        console: shows progress and table.
    """

    settings: dict[str, Any]
    maker: Callable[[str], Task]
    folder: Path
    jobs: int
    console: Console


def settings_of(
    margins: Mapping[str, float | None], policies: Sequence[str], n_seeds: int | None, **more: Any
) -> dict[str, Any]:
    """Settings of a `Study`.

    Args:
        margins: by model; None: none is stated.
        policies: names of `train.POLICIES`, with or without "off".
        n_seeds: matched seeds; None takes the fewest that decide, or those of a quick run.
        more: steps, quick and others.
    """
    seeds = n_seeds or (QUICK["seeds"] if more["quick"] else FEWEST_SEEDS)
    return {
        "models": list(margins),
        "policies": ["off", *(p for p in policies if p != "off")],
        "seeds": dict.fromkeys(margins, seeds),
        "margins": {model: margin for model, margin in margins.items() if margin is not None},
        **more,
    }
