"""The memory asked for, predicted and measured: `InstallHandle.goal`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from cswap.advisor.options import decided_by
from cswap.config import DEVICE, LEAST, SLOWDOWN
from cswap.display import shown
from cswap.errors import ConfigError
from cswap.fit.whole_device import usable_bytes
from cswap.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from cswap.config import SwapConfig

Phase = Literal[
    "compiling",
    "exploring",
    "timing",
    "planning",
    "obeying",
    "changing",
    "unreachable",
    "given up",
]

_EXCLUDED_BY_FIT: Final[Mapping[str, object]] = {
    "plan": None,
    "budget": None,
    "keep_last": 0,
    "policy": "auto",
    "verify": False,
}
"""Options that decide about the same things, with the values at which they do not."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The goal.

    Attributes:
        limit_bytes: of device memory in a step; None: as few as the slowdown allows.
        slowdown: longest step over that without cswap; None: as short as the limit allows.
        of_device: the limit is what the device has.
        by_default: nobody has asked.
    """

    limit_bytes: int | None
    slowdown: float | None
    of_device: bool = False
    by_default: bool = False

    def on(self, device: torch.device) -> Asked:
        """The goal of a model on this device.

        Raises:
            ConfigError: the device's memory is asked for, and it is not a GPU.
        """
        return replace(self, limit_bytes=usable_bytes(device)) if self.of_device else self

    @staticmethod
    def without_fit(config: SwapConfig) -> Asked | None:
        """The goal without ``fit``; None: the options say what has to leave.

        A lossy codec without ``slowdown`` says that bytes matter more than time.
        """
        names = [
            name for name in _EXCLUDED_BY_FIT if getattr(config, name) != _EXCLUDED_BY_FIT[name]
        ]
        bytes_first = config.lossy != "off" and config.slowdown is None
        if config.fit is not None or names or bytes_first or decided_by(config) is not None:
            return None
        return Asked(None, config.slowdown or SLOWDOWN, by_default=True)

    @staticmethod
    def of(config: SwapConfig, *, has_model: bool) -> Asked | None:
        """The goal that the options ask for; None: they ask for none.

        Raises:
            ConfigError: options contradict each other.
        """
        if config.schedule is not None and (
            not has_model or (config.fit is None and Asked.without_fit(config) is None)
        ):
            raise ConfigError(
                f"schedule={shown(config.schedule)}: needs a model and a goal. Use "
                "cswap.install(model, fit=..., schedule=...)."
            )
        if config.fit is None:
            return None
        if not has_model:
            raise ConfigError(
                f"fit={config.fit!r}: needs a model. Use cswap.install(model, fit=...)."
            )
        for name, neutral in _EXCLUDED_BY_FIT.items():
            if getattr(config, name) != neutral:
                raise ConfigError(
                    f"{name}={getattr(config, name)!r} with fit={config.fit!r}: a goal decides "
                    f"that. Leave {name} out."
                )
        if config.fit == LEAST:
            return Asked(None, config.slowdown or SLOWDOWN)
        if config.slowdown is not None:
            raise ConfigError(
                f"slowdown={config.slowdown} with fit={config.fit!r}: such a goal already takes "
                f"the least time. Use fit={LEAST!r} with slowdown."
            )
        if config.fit == DEVICE:
            return Asked(None, None, of_device=True)
        assert isinstance(config.fit, int)  # parsed
        return Asked(config.fit, None)


TOLERANCE: Final = 1e-5
"""Of a solver, in a constraint of bytes."""


def most_bytes(limit_bytes: float) -> float:
    """Bytes that count as within a limit, of a plan and of a measured step."""
    return limit_bytes * (1 + TOLERANCE)


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal as it stands; prints as one line.

    Attributes:
        asked_bytes: the limit; None: the least memory.
        asked_slowdown: the limit of time; None: the least time.
        phase: "compiling" (steps without cswap, while another process compiles kernels, once per
            machine), "exploring" (steps with every tensor in its smallest form), "timing" (steps
            without cswap), "planning" (as exploring, until the plan is there), "obeying",
            "changing" (the same, but steps save other tensors again and again, which was logged: no
            plan knows them all), "unreachable" (the error has been raised, or logged if the limit
            is the device's; the plan of the least memory is obeyed), "given up" (cswap decides as
            without a goal; the log has the reason).
        predicted_bytes: peak of a step by the plan; None: there is none yet.
        measured_bytes: highest peak of the steps under this plan, its first one left out; before a
            plan, of the last step. None: no step yet, or a plan that nobody has asked for, since
            the allocator's statistics are the user's.
        measured_by: how, in words.
        resident_bytes: of these, the others: parameters, buffers, gradients, optimizer
            state. Measured on a CPU, part of the allocator's peak on a GPU.
        smallest_bytes: a limit that can be reached, and the smallest one that was measured so far:
            with ``fit=`` at this number, the same training holds it. At first from the explored
            steps; smaller ones may be possible, and the error of a limit that is out of reach
            names the least (phase "unreachable"). None: nothing was measured yet, or tensors have
            grown since.
        plain_s: the same without cswap: of measured steps less cswap's time, or of a plain step.
        predicted_slowdown: of forward and backward, by the plan.
        step_s: seconds of a step: on a CPU of forward and backward, the median of the last four;
            on a GPU from one forward to the next, the lower quartile of the last sixteen.
        plans: how many have been made.
        actions: of the plan: tensors by "keep", "remat" and codec.
    """

    asked_bytes: int | None
    asked_slowdown: float | None
    phase: Phase
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    measured_by: str = ""
    resident_bytes: int = 0
    smallest_bytes: int | None = None
    plain_s: float | None = None
    predicted_slowdown: float | None = None
    step_s: float | None = None
    plans: int = 0
    actions: Counter[str] = field(default_factory=Counter)

    @property
    def held(self) -> bool | None:
        """Whether the measured peak is within the limit; None: not known, or no limit."""
        if (
            self.asked_bytes is None
            or self.measured_bytes is None
            or self.phase not in ("obeying", "changing")
        ):
            return None
        return self.measured_bytes <= most_bytes(self.asked_bytes)

    def __str__(self) -> str:
        asked = (
            f"the least memory at {self.asked_slowdown} of the time"
            if self.asked_bytes is None
            else show_bytes(self.asked_bytes)
        )
        text = f"goal {asked}: {self.phase}"
        if self.predicted_bytes is not None:
            text += f"; predicted {show_bytes(self.predicted_bytes)}"
        if self.measured_bytes is not None:
            text += f"; measured {show_bytes(self.measured_bytes)} ({self.measured_by})"
        if self.predicted_slowdown is not None:
            text += f"; {self.predicted_slowdown:.2f} of the time, predicted"
        ways = [f"{count} {name}" for name, count in sorted(self.actions.items())]
        return text + (f"; {', '.join(ways)}" if ways else "")
