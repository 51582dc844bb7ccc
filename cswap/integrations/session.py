"""One training of one model: cswap on it, and its figures since the last look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.api import install_on
from cswap.log import log
from cswap.stats.stats import Stats

if TYPE_CHECKING:
    from torch import nn

    from cswap.api import InstallHandle
    from cswap.config import SwapConfig

MIB: Final = 1 << 20

CHECKPOINTED: Final = (
    "Gradient checkpointing is on: a block keeps its inputs alone, and computes the rest again. "
    "Left for cswap are these inputs, and what one block saves while it is computed again."
)


class Session:
    """Installs at the start of a training, removes at its end.

    Attributes:
        config: the options.
        handle: of the installation; None before and after.
    """

    def __init__(self, config: SwapConfig) -> None:
        """Args: config: the options."""
        self.config = config
        self.handle: InstallHandle | None = None
        self._seen = Stats()
        self._last: Stats | None = None

    def start(self, model: nn.Module, entry: str = "forward") -> None:
        """Install on a model; an installation that was left over is removed first.

        Args:
            model: to be trained.
            entry: its method that a training step calls.
        """
        self.stop()
        self.handle = install_on(model, self.config, entry)
        self._seen, self._last = Stats(), None
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            log.info(CHECKPOINTED)

    def stop(self) -> None:
        """Remove, and log why little was saved, if little was; a second time does nothing."""
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        try:
            self._last = handle.stats
        finally:
            handle.remove()
        for note in self._last.notes():
            log.info("%s", note)

    @property
    def stats(self) -> Stats:
        """Statistics of the training that runs, or of the last one."""
        if self.handle is not None:
            return self.handle.stats
        return self._last or Stats()

    def figures(self) -> dict[str, float]:
        """Figures since the last call, for a log.

        Returns:
            ``cswap/held_mib``: most MiB of device memory that saved tensors have held at a time, in
            the last 16 steps; ``cswap/saved_mib``: MiB that the last step has gained;
            ``cswap/ratio``: raw over encoded bytes, since the start. Since the last call:
            ``cswap/remat_mib``: MiB that are computed again instead of stored;
            ``cswap/exposed_s``: seconds that the training waited for cswap;
            ``cswap/fallbacks``: slower paths that were taken.
        """
        now, before = self.stats, self._seen
        self._seen = now
        return {
            "cswap/held_mib": now.recent_peak_bytes / MIB,
            "cswap/saved_mib": now.step_gained_bytes / MIB,
            "cswap/ratio": now.ratio,
            "cswap/remat_mib": (_recomputed_bytes(now) - _recomputed_bytes(before)) / MIB,
            "cswap/exposed_s": now.exposed_s - before.exposed_s,
            "cswap/fallbacks": float(now.fallbacks - before.fallbacks),
        }


def _recomputed_bytes(stats: Stats) -> int:
    found = stats.by_codec.get("remat")
    return 0 if found is None else found.raw
