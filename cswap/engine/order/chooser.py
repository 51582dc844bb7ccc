"""The seam between an engine and whoever decides for it, tensor by tensor: a goal (`cswap.fit`).

Without a chooser, the engine's own advisor decides.

Note [steps without a look]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A chooser needs to know a step's tensors by name, and when each of them comes and goes. That takes
longer than to hold most of them. So once its decisions are obeyed, it looks at a step now and then.
In the steps between, each place in the step (Note [a step goes by position] in recipes.py) keeps
the choice that was made for the tensor of the last look. If another tensor comes, the advisor
decides, the chooser is told (`Chooser.missed`), and it looks at the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    import torch

    from cswap.advisor.cost import Candidate
    from cswap.advisor.site_history import Explanation
    from cswap.engine.saved.packed import Kept, PackedView
    from cswap.engine.saved.unread import Unread
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.notes import Notes


Took: TypeAlias = "deque[tuple[int, int, float]]"
"""Position, bytes and seconds in the hooks of each tensor that has left and come back. Any thread
may append."""

MOST_TOOK: Final = 1 << 14
"""Times that are remembered."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision for one tensor.

    Attributes:
        action: ``"keep"``, ``"remat"``, or the name of a codec.
        notes: told how the encode went; None: nobody is.
    """

    action: str
    notes: Notes | None = None


STAYS: Final = Choice("keep")
"""The tensor stays."""


class Chooser(Protocol):
    """Decides instead of the advisor, and sees the tensors that are packed and unpacked.

    See Note [steps without a look].

    Attributes:
        took: gets the times of tensors in steps without a look.
    """

    took: Took

    def begin_step(self) -> None:
        """A forward of the model begins. It may raise: nothing of the step has been done yet."""
        ...

    def keeps(self, tensor: torch.Tensor, scope: str) -> bool:
        """Whether a tensor that a module saves stays, so that nothing need be known of it."""
        ...

    def choose(
        self,
        tensor: torch.Tensor,
        handle: Handle,
        again_s: Callable[[], float | None],
        candidates: Callable[[], tuple[Candidate, ...]],
    ) -> Choice | None:
        """Decide for a tensor that is being saved; None leaves it to the advisor.

        Args:
            tensor: as autograd saves it.
            handle: of the tensor.
            again_s: finds out how many seconds computing it again takes; None: it cannot be.
            candidates: asks the advisor for the codecs that may take it, with their predicted cost.
        """
        ...

    def enter(self) -> Any:
        """The engine is about to pack or to unpack a tensor; `packed` or `unpacked` get this."""
        ...

    def packed(
        self, tensor: torch.Tensor, packed: Kept | PackedView | Unread, entered: Any
    ) -> None:
        """A tensor was packed. Args: entered: of `enter`."""
        ...

    def settle(self) -> None:
        """Take tensors that are gone off the counts: somebody looks at these."""
        ...

    def used(self, made: torch.Tensor | None = None) -> None:
        """A tensor was unpacked that is in no plan, or a backward is over.

        Args:
            made: the tensor, if it has memory of its own from here on.
        """
        ...

    def unpacked(self, packed: PackedView, tensor: torch.Tensor, entered: Any) -> None:
        """A tensor was unpacked, as ``tensor``. Args: entered: of `enter`."""
        ...

    def explained(self) -> list[Explanation]:
        """Its decisions, in the order of the step; empty while it has none."""
        ...

    def missed(self) -> None:
        """Another tensor was saved than in the step before; without a look, or one more."""
        ...
