"""The margin of each task: the mean loss that would not matter, stated before the comparison.

The margin is half the standard deviation of the validation loss of plain training over seeds. So a
policy that costs one standard deviation of the seeds lies beyond the margin.
The standard deviation comes from pilot runs without cswap, whose seeds the comparison does not use:
``python -m bench accuracy --pilot`` makes them and writes ``pilot.json``.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any, Final

from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARE: Final = 0.5
"""Margin as a share of the seeds' standard deviation."""

PILOT_SEEDS: Final = range(100, 108)

MARGINS: Final = {"cnn": 0.012, "resnet": 0.0058, "vit": 0.017, "gpt": 0.0051}
"""Nats of validation loss by task, at the task's own data and number of steps: `SHARE` of the
standard deviation in ``bench/results/cpu/accuracy/pilot.json``, rounded to two digits."""


def margin_of(losses: Sequence[float]) -> float:
    """The margin that pilot runs with these validation losses give, rounded to two digits.

    >>> margin_of([0.30, 0.34, 0.28, 0.33, 0.31])
    0.012
    """
    spread = SHARE * statistics.stdev(losses)
    return round(spread, 1 - math.floor(math.log10(spread))) if spread else 0.0


def parse(text: str, models: Sequence[str]) -> dict[str, float]:
    """Margins that were stated on the command line.

    Args:
        text: ``MODEL=NATS`` or NATS for all models, separated by commas.
        models: the trained models.

    Raises:
        ConfigError: an unknown model, or no number above 0.

    >>> parse("cnn=0.02, vit=0.01", ["cnn", "vit"]), parse("0.05", ["gpt"])
    ({'cnn': 0.02, 'vit': 0.01}, {'gpt': 0.05})
    """
    found: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        model, equals, number = part.rpartition("=")
        if equals and model not in models:
            raise ConfigError(f"--margin {part!r}: unknown model; known are {', '.join(models)}.")
        found |= dict.fromkeys([model] if equals else models, _nats(number, part))
    return found


def _nats(text: str, part: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"--margin {part!r}: must be a number of nats above 0, such as 0.01.")
    return number


def stated(settings: dict[str, Any], given: dict[str, float]) -> dict[str, float]:
    """The margins of a comparison: the given ones over those of `MARGINS`, where these hold.

    Those of `MARGINS` hold for the tasks as they are, so not for other data, another number of
    steps, ``--quick`` or a user's task.
    """
    changed = settings["data"] or settings["steps"] is not None or settings["quick"]
    own = changed or "task" in settings
    known = {} if own else {m: MARGINS[m] for m in settings["models"] if m in MARGINS}
    return {**known, **given}
