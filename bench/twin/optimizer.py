"""An optimizer of the twin: one of torch's, so that its hooks run, whose step takes time alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class TimedOptimizer(torch.optim.Optimizer):
    """Writes no parameter."""

    def __init__(self, parameters: list[torch.Tensor], work: Callable[[], None]) -> None:
        """Args: parameters: of the model; work: takes the memory and the time of a step."""
        super().__init__(parameters, {})
        self._work = work

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # no loss is returned
        """One step. Args: closure: is not called."""
        self._work()
