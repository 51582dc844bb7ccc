"""cswap in the Trainer of Lightning.

    trainer = Trainer(callbacks=[CswapCallback(lossy="int8")])
    trainer.fit(module, data)

A training step calls ``training_step`` and not ``forward``, so that is where tensors are swapped:
those that loss functions save among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from cswap.integrations.options import read_options
from cswap.integrations.session import Session

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from cswap.integrations.options import Source
    from cswap.option_types import SwapOptions
    from cswap.stats.stats import Stats

__all__ = ["CswapCallback"]


class CswapCallback(Callback):  # type: ignore[misc]
    """Swaps while a model is fitted, and gives figures to the trainer's loggers.

    The figures are those of `cswap.integrations.session.Session.figures`. They are logged every
    ``log_every_n_steps`` steps of the trainer.
    """

    def __init__(self, source: Source | None = None, **options: Unpack[SwapOptions]) -> None:
        """Check the options.

        Args:
            source: options as a `cswap.SwapConfig`, a mapping, or the path of a YAML or JSON file.
            **options: as of `cswap.install`; they override ``source``.

        Raises:
            ConfigError: an option is wrong.
        """
        self._session = Session(read_options(source, options))

    @property
    def stats(self) -> Stats:
        """Statistics of the fit that runs, or of the last one."""
        return self._session.stats

    def remove(self) -> None:
        """Take cswap off the model; a second time does nothing."""
        self._session.stop()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Install."""
        self._session.start(pl_module, entry="training_step")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log figures, as often as the trainer logs."""
        every = trainer.log_every_n_steps
        if self._session.handle is None or not every or trainer.global_step % every:
            return
        figures = self._session.figures()
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove."""
        self.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove."""
        self.remove()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove, whatever came before."""
        self.remove()
