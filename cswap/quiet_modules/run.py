"""A call of the model in which the hooks are off around quiet modules: `Run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from cswap import hook_stack
from cswap.quiet_modules.stretch import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.engine.engine import SwapEngine
    from cswap.quiet_modules.stretch import Tracked


class Pair(Protocol):
    """The hooks of one call of the model: `cswap.hooks.HookPair`."""

    def pack(self, tensor: torch.Tensor) -> object:
        """Autograd's hook."""
        ...

    def pack_by(self, pack: Callable[[torch.Tensor], object]) -> None:
        """Args: pack: is called instead of the engine's from here on, and calls that."""
        ...


class Run:
    """One call of the model, in its thread. The hooks are off while a quiet module runs.

    Attributes:
        off: length of the stack of scopes in the outermost quiet module; 0: the hooks are on.
        ended: whether a rest has ended in a module, which will be quiet again when that is learned.
    """

    learns: Final = False
    """A `Learner` does."""

    def __init__(self, engine: SwapEngine, pair: Pair) -> None:
        """Args: engine: swaps; pair: the hooks."""
        self._engine, self._pair = engine, pair
        self.off = 0
        self.ended = False

    def enter(self, tracked: Tracked, module: torch.nn.Module, args: Any, depth: int) -> None:
        """A module begins, and the hooks are on.

        Args:
            tracked: it.
            module: it.
            args: of its forward.
            depth: length of the stack of scopes in it.
        """
        stretch, packer = tracked.stretch, self._engine.packer
        if stretch is None or packer.book.position != stretch.first:
            return
        resting = stretch.resting
        if resting is not None and not packer.may_rest(resting.until, resting.limited):
            self.ended = True
            return
        if module.training is not stretch.training or facts_of(args) != stretch.arguments:
            return
        if hook_stack.owner_of_top() is not self._pair:
            return
        hook_stack.pop()
        self.off = depth
        packer.book.skip(stretch.n_places)
        if resting is not None and resting.tensors:
            packer.rest_unseen(resting)

    def leave(self, tracked: Tracked) -> None:
        """The outermost quiet module ends."""
        self.off = 0
        if tracked.stretch is not None:
            self._engine.counters.unseen.append(tracked.stretch.unseen)
        if (
            hook_stack.top(True) is None
        ):  # else somebody has put hooks there, and will take off the top ones
            hook_stack.push(self._pair.pack, self._engine.unpack)
