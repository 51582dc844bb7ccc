"""The options of the demo, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cswap.errors import ConfigError
from cswap.experiments.options import names, writable_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MODELS = ("cnn", "gpt", "gpt6")
DEFAULT_MODELS = ("cnn", "gpt")
"""Of MODELS. gpt6 takes longer than the other two together."""

MODES = ("off", "lossless", "remat", "int8", "checkpoint")
DEFAULT_MODES = ("off", "remat", "int8", "checkpoint")
"""Of MODES. lossless is remat, cswap's default, with nothing computed again."""

STEPS = 15
"""Training steps of a model: enough to see it learn, in a minute."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Options of one demo run.

    Attributes:
        out: folder for results.json and the picture; created if missing.
        models: names of MODELS to train.
        modes: names of MODES to compare; "off" is always among them.
        n_steps: training steps per model; None takes STEPS, or a few if quick.
        seed: of weights, batches and dropout.
        quick: tiny models and a few steps, to see that everything works.
    """

    out: Path
    models: tuple[str, ...] = DEFAULT_MODELS
    modes: tuple[str, ...] = DEFAULT_MODES
    n_steps: int | None = None
    seed: int = 0
    quick: bool = False

    @classmethod
    def parse(
        cls, *, out: Path, models: str, modes: str, steps: int | None, seed: int, quick: bool
    ) -> DemoSettings:
        """Check the command line's options.

        Raises:
            ConfigError: an unknown or missing name, a number out of range, or a folder that
                cannot be written.
        """
        chosen_modes = _in_order("--modes", modes, MODES)
        if "off" not in chosen_modes:
            raise ConfigError(
                f"--modes {modes!r}: 'off' is missing; the others are compared with it. Add it."
            )
        if steps is not None and steps < 1:
            raise ConfigError(f"--steps {steps}: must be at least 1.")
        if seed < 0:
            raise ConfigError(f"--seed {seed}: must not be negative.")
        return cls(
            out=writable_folder(out),
            models=_in_order("--models", models, MODELS),
            modes=chosen_modes,
            n_steps=STEPS if steps is None and not quick else steps,
            seed=seed,
            quick=quick,
        )


def _in_order(option: str, given: str, known: Sequence[str]) -> tuple[str, ...]:
    asked = names(option, given, known)
    return tuple(name for name in known if name in asked)
