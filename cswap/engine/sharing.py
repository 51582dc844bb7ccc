"""Tensors that are saved in the memory of one that has been saved before.

See Note [when two saved tensors are one] in aliases.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.codecs.layout import torch_dtype
from cswap.engine.saved.aliases import is_result, is_saved_again, make_token
from cswap.engine.saved.operators import EXCLUDED
from cswap.engine.saved.packed import PackedView
from cswap.engine.transfer.handle import State
from cswap.recent import Recent

if TYPE_CHECKING:
    import torch

    from cswap.engine.saved.outer import Outer
    from cswap.engine.saved.packed import Token
    from cswap.engine.saved.without_handle import SharedUse
    from cswap.engine.state import EngineState

SAVED_AGAIN: Final = "saved_again"
"""Reason of leaves (`cswap.stats.keep_reasons`)."""

MOST_SAVED_AGAIN: Final = 1 << 12
"""Tensors that are remembered. One that is forgotten leaves once more before it stays."""


class Sharing:
    """The shared memory of one engine's tensors.

    Attributes:
        saved_again: position and bytes of tensors whose memory stays, because a leaf in it, or one
            that has to stay, was saved again; and the reason (`cswap.stats.keep_reasons`).
    """

    def __init__(self, state: EngineState) -> None:
        """Args: state: the engine's."""
        self._lock, self._aliases, self._counters = state.lock, state.aliases, state.counters
        self._watch = state.watch
        self.saved_again: Recent[tuple[int, int], str] = Recent(MOST_SAVED_AGAIN)

    def pack(self, token: Token, tensor: torch.Tensor, outer: Outer | None) -> PackedView:
        """The packed object of a tensor in the memory of this token. Args: outer: see `use_of`."""
        if not is_result(tensor) and (outer is None or tensor._base is not None):  # noqa: SLF001
            token = self._pin(token, tensor, SAVED_AGAIN)
        return self._packed(token, tensor)

    def keep(self, token: Token, tensor: torch.Tensor) -> PackedView:
        """The same for a tensor that has to stay: Note [several operators save the same memory]."""
        return self._packed(self._pin(token, tensor, EXCLUDED), tensor)

    def _packed(self, token: Token, tensor: torch.Tensor) -> PackedView:
        with self._lock:
            token.users += 1
        self._counters.share()
        return PackedView(token, tensor)

    @staticmethod
    def use_of(token: Token, tensor: torch.Tensor, outer: Outer | None) -> SharedUse | None:
        """The shared use, if both may do without a handle the next time.

        Args:
            token: of the tensor that was saved first.
            tensor: that is saved now.
            outer: of which it is a part (saved/apart.py): it may not.
        """
        shared_use = token.shared_use
        if shared_use is None:
            return None
        if outer is None and is_saved_again(
            tensor, token.handle.base, torch_dtype(token.handle.meta.dtype)
        ):
            shared_use.again = True
            return shared_use
        shared_use.seen = True
        return None

    def pin(self, token: Token, reason: str = SAVED_AGAIN) -> None:
        """The memory stays anyway: no encoding, from the next step on from the beginning."""
        handle = token.handle
        if token.shared_use is not None:
            token.shared_use.seen = True
        self.saved_again[handle.position, handle.raw_nbytes] = handle.pinned = reason

    def _pin(self, token: Token, tensor: torch.Tensor, reason: str) -> Token:
        # A tensor whose own memory stays is saved again.
        handle, lane = token.handle, token.lane
        self.pin(token, reason)
        if handle.state is State.KEPT and not handle.must_round_trip:
            return token
        storage = tensor.untyped_storage()
        mine = make_token(tensor, lane, storage)
        mine.handle.pinned = reason
        mine.handle.site, mine.handle.step = handle.site, handle.step
        self._watch(mine)
        self._counters.admit(mine.handle.raw_nbytes)
        self._counters.stay(reason, mine.handle.raw_nbytes)
        with self._lock:
            self._aliases.add(mine.handle, storage)
        return mine
