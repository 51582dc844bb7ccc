"""Tensors that the program holds itself while backward runs: a batch, an output, a feature.

To swap such a tensor frees nothing: its encoding comes on top of its memory. It is recognised when
backward asks for it: the tensor that owns the memory still exists. From the next step on it stays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cswap.advisor.live_costs import KEEP
from cswap.engine.transfer.handle import State
from cswap.ranks import must_agree
from cswap.recent import Recent

if TYPE_CHECKING:
    from cswap.advisor.site_history import Explanation
    from cswap.config import SwapConfig
    from cswap.engine.saved.packed import Token
    from cswap.engine.transfer.handle import Handle


MOST_KNOWN: Final = 1 << 12
"""Tensors that are remembered. One that is forgotten leaves once more before it stays."""

WHY: Final = "the program holds it"
"""Reason for such a tensor, in words."""


class Outliving:
    """Finds the tensors that the program holds.

    Attributes:
        known: their position in the step and their bytes.
    """

    def __init__(self, config: SwapConfig) -> None:
        """Args: config: options that say what leaves, or a goal that does, are obeyed."""
        self.known: Recent[tuple[int, int], bool] = Recent(MOST_KNOWN)
        self._lossy = config.lossy != "off"
        self._looks = (
            config.policy == "auto"
            and config.codec == "auto"
            and config.plan is None
            and config.fit is None
            and config.budget is None
        )

    def note(self, token: Token) -> None:
        """Backward asks for a tensor for the first time."""
        handle = token.handle
        key = handle.position, handle.raw_nbytes
        if not _is_held(handle):
            self.known.pop(key)
        elif self._looks and (handle.state is not State.KEPT or handle.recomputed):
            # Which values are rounded must not depend on when Python collects its garbage.
            if self._lossy and must_agree(lossy=True):
                return
            self.known[key] = True
            if token.shared_use is not None:
                token.shared_use.seen = True  # the next one needs a handle, which is asked for

    def explained(self, found: Explanation) -> Explanation:
        """The explanation of a call site, changed if the program holds the tensor: it stays."""
        nbytes = found.nbytes
        if nbytes is None or (found.position, nbytes) not in self.known:
            return found
        return replace(found, codec=KEEP, reason=WHY)


def _is_held(handle: Handle) -> bool:
    # Whether the memory is that of a tensor that exists. Pipelines replace the memory of an output
    # that they hold only for its graph.
    owner = None if handle.base is None else handle.base()
    if owner is None:
        return False
    storage = owner.untyped_storage()
    return storage._cdata == handle.storage_key and storage.nbytes() > 0  # noqa: SLF001
