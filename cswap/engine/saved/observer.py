"""What the guard wants to know in some steps: which tensors are saved where, and encoded how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cswap.engine.saved.packed import PackedView

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec
    from cswap.engine.saved.packed import Kept
    from cswap.engine.transfer.handle import Handle


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd saved, and the handle that serves it.

    Attributes:
        scope: path of the module that saved it now; the handle's site is the first that did.
        dtype: its dtype.
        sizes: its shape.
        handle: of the memory; says which codec was chosen.
    """

    scope: str
    dtype: torch.dtype
    sizes: torch.Size
    handle: Handle

    def codec(self) -> Codec | None:
        """The lossy codec chosen for it; None if it is kept, or encoded exactly."""
        sections = self.handle.sections
        return None if not sections or sections[0].codec.lossless else sections[0].codec


class Observer:
    """Where the engine notes what is saved, in the steps in which the guard wants to know.

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
            # Not the token: what it stands for is to be freed as if nobody watched.
            seen.append(Saved(scope, tensor.dtype, tensor.shape, packed.token.handle))
