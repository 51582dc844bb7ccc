"""Steps without cswap on a machine's first use, while a process compiles kernels: `FirstUse`.

See Note [the first use of a machine] in cswap/codecs/first_use.py. Only a goal for which nobody has
asked waits: a limit of bytes may leave no room for steps without cswap. Nor does one with lossy
codecs: a loss is not to depend on the moment at which such steps end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cswap.codecs import first_use
from cswap.log import log

if TYPE_CHECKING:
    from cswap.engine.engine import SwapEngine


class FirstUse:
    """Takes the hooks off as long as kernels are compiled."""

    def __init__(self, engine: SwapEngine) -> None:
        """Args: engine: whose hooks go off."""
        self._engine = engine
        self._awaited: list[str] = []  # names of dtypes

    def begin(self, model: torch.nn.Module) -> bool:
        """Compile the kernels for a model on a CPU, if this machine has none; whether it does."""
        dtypes = first_use.missing(_saved_dtypes(model))
        if not dtypes:
            return False
        try:
            first_use.begin(dtypes)
        except OSError as error:
            log.info("Kernels cannot be compiled beside the training (%s).", error)
            return False
        self._awaited, self._engine.sits_out = dtypes, True
        log.warning(
            "Kernels for %s are compiled beside the training, once per machine, for about a "
            "minute: steps run without cswap until then. `cswap warm` does it beforehand.",
            ", ".join(dtypes),
        )
        return True

    @property
    def goes_on(self) -> bool:
        """Whether the step that begins runs without cswap."""
        if self._awaited and first_use.is_done(self._awaited):
            self.end()
        return bool(self._awaited)

    def end(self) -> None:
        """Wait no more: the hooks are on from the step on that begins."""
        if self._awaited:
            self._awaited, self._engine.sits_out = [], False


def _saved_dtypes(model: torch.nn.Module) -> list[torch.dtype]:
    # Of the tensors that a step is likely to save; autocast may begin within the model.
    found = [x.dtype for x in model.parameters()]
    return list(dict.fromkeys([*found, torch.get_autocast_dtype("cpu"), torch.bool, torch.int64]))
