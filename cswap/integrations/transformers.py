"""cswap in the Trainer of transformers, and in those made from it (TRL's, for example).

    trainer = Trainer(model, args, train_dataset=data)
    CswapCallback(lossy="int8").attach(trainer)
    trainer.train()

Note [callbacks and exceptions]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The Trainer tells its callbacks nothing of an exception, and gives figures to TensorBoard, W&B and
the like before it asks later callbacks. So `CswapCallback.attach` puts the callback in front of the
others, and has ``trainer.train`` end with a removal, whatever ends it. A callback that is given as
``Trainer(callbacks=[...])`` does without both: its figures are in ``state.log_history`` and in what
is printed, and after an exception the model stays installed until the next training or `remove`.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from cswap.integrations.options import CswapArguments, read_options
from cswap.integrations.session import Session
from cswap.removable import RemovedAtExit

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self, Unpack

    from cswap.integrations.options import Source
    from cswap.option_types import SwapOptions
    from cswap.stats.stats import Stats

__all__ = ["CswapArguments", "CswapCallback"]


class CswapCallback(RemovedAtExit, TrainerCallback):  # type: ignore[misc]
    """Swaps while a Trainer trains, and adds figures to its logs.

    The figures are those of `cswap.integrations.session.Session.figures`.
    """

    def __init__(self, source: Source | None = None, **options: Unpack[SwapOptions]) -> None:
        """Check the options.

        Args:
            source: options as a `cswap.SwapConfig`, a mapping, `CswapArguments`, or the path of a
                YAML or JSON file.
            **options: as of `cswap.install`; they override ``source``.

        Raises:
            ConfigError: an option is wrong.
        """
        self._session = Session(read_options(source, options))

    def attach(self, trainer: Any) -> Self:
        """Add this callback to a Trainer. See Note [callbacks and exceptions].

        Args:
            trainer: a `transformers.Trainer`.

        Returns:
            This callback.
        """
        handler = trainer.callback_handler
        if self not in handler.callbacks:
            handler.callbacks.insert(0, self)
        train = trainer.train

        @wraps(train)
        def train_and_remove(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self.remove()

        trainer.train = train_and_remove
        return self

    def remove(self) -> None:
        """Take cswap off the model; a second time does nothing."""
        self._session.stop()

    @property
    def stats(self) -> Stats:
        """Statistics of the training that runs, or of the last one."""
        return self._session.stats

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Install."""
        self._session.start(model)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        """Add figures to the Trainer's logs while it trains."""
        if logs is None or self._session.handle is None:
            return
        figures = self._session.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Remove."""
        self.remove()
