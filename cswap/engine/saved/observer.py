"""Notes for the guard, in some steps: which tensors are saved where, and encoded how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cswap.engine.saved.packed import PackedView

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec
    from cswap.engine.saved.packed import Kept, Token
    from cswap.engine.transfer.handle import Handle


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd saved, and the handles that serve it.

    Attributes:
        scope: path of the module that saved it now; a handle's site is the first that did.
        dtype: its dtype.
        sizes: its shape.
        handles: of its memory; of what it is computed from, if it is computed again. They say which
            codecs were chosen.
    """

    scope: str
    dtype: torch.dtype
    sizes: torch.Size
    handles: tuple[Handle, ...]

    def lossy(self) -> Handle | None:
        """The first handle for which a lossy codec was chosen; None if all bits come back."""
        for handle in self.handles:
            if handle.codec is not None and not handle.codec.lossless:
                return handle
        return None

    def codec(self) -> Codec | None:
        """The lossy codec chosen for it; None if all bits come back."""
        handle = self.lossy()
        return None if handle is None else handle.codec


def _sources(token: Token) -> tuple[Handle, ...]:
    if not token.handle.recomputed or token.remat is None:
        return (token.handle,)
    inputs = (packed for packed in token.remat.inputs if isinstance(packed, PackedView))
    return tuple(handle for packed in inputs for handle in _sources(packed.token))


class Observer:
    """Takes the engine's notes on saved tensors, in the steps in which the guard asks for them.

    Attributes:
        seen: in order; None: nobody wants to know.
    """

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: list[Saved] | None = None

    def note(self, scope: str, tensor: torch.Tensor, packed: Kept | PackedView) -> None:
        """A tensor was saved in this scope."""
        seen = self.seen  # another thread may end the watch
        if seen is not None and isinstance(packed, PackedView):
            # Not the tokens: their tensors are to be freed as if nobody watched.
            seen.append(Saved(scope, tensor.dtype, tensor.shape, _sources(packed.token)))
