"""cswap in a loop that accelerate drives.

with CswapPlugin(accelerator, lossy="int8") as swaps:
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    swaps.install(model)
    for step, batch in enumerate(data):
        ...
        swaps.log(step)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cswap.errors import ConfigError
from cswap.integrations.options import read_options
from cswap.integrations.session import Session
from cswap.removable import RemovedAtExit

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cswap.integrations.options import Source
    from cswap.option_types import SwapOptions
    from cswap.stats.stats import Stats

__all__ = ["CswapPlugin"]


class CswapPlugin(RemovedAtExit):
    """Swaps the tensors that a prepared model saves until the ``with`` ends, whatever ends it."""

    def __init__(
        self, accelerator: Any, source: Source | None = None, **options: Unpack[SwapOptions]
    ) -> None:
        """Check the options.

        Args:
            accelerator: an `accelerate.Accelerator`.
            source: options as a `cswap.SwapConfig`, a mapping, or the path of a YAML or JSON file.
            **options: as of `cswap.install`; they override ``source``.

        Raises:
            ConfigError: an option is wrong, or ``accelerator`` is no Accelerator.
        """
        if not hasattr(accelerator, "unwrap_model"):
            raise ConfigError(f"accelerator={type(accelerator).__name__}: must be an Accelerator.")
        self._accelerator = accelerator
        self._session = Session(read_options(source, options))

    def install(self, model: Any) -> None:
        """Swap the tensors that this model saves from now on.

        Args:
            model: as `Accelerator.prepare` returned it.
        """
        self._session.start(self._accelerator.unwrap_model(model))

    @property
    def stats(self) -> Stats:
        """Statistics so far, or until the removal."""
        return self._session.stats

    def log(self, step: int | None = None) -> None:
        """Give `cswap.integrations.session.Session.figures` to the accelerator's trackers."""
        self._accelerator.log(self._session.figures(), step=step)

    def remove(self) -> None:
        """Take cswap off the model; a second time does nothing."""
        self._session.stop()
