"""A call of the model in which the hooks are off where all tensors stay: `Run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from cswap import hook_stack
from cswap.dynamo import leave_alone
from cswap.quiet_modules.stretch import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.engine.engine import SwapEngine
    from cswap.quiet_modules.stretch import Boundary, Span


class Pair(Protocol):
    """The hooks of one call of the model: `cswap.hooks.HookPair`."""

    def pack(self, tensor: torch.Tensor) -> object:
        """Autograd's hook."""
        ...

    def pack_by(self, pack: Callable[[torch.Tensor], object]) -> None:
        """Args: pack: is called instead of the engine's from here on, and calls that."""
        ...


class Run:
    """One call of the model, in its thread.

    Attributes:
        changed: whether the modules came in another order than they were learned.
    """

    learns: Final = False
    """A `Learner` does."""

    def __init__(self, engine: SwapEngine, pair: Pair) -> None:
        """Args: engine: swaps; pair: the hooks."""
        self._engine, self._pair = engine, pair
        self._off: Span | None = None  # for which the hooks are off
        self.changed = False

    @leave_alone
    def at(self, boundary: Boundary, module: torch.nn.Module, values: Any) -> None:
        """See `ModuleCalls`."""
        off = self._off
        if off is None:
            span = boundary.span
            if span is not None:
                self._turn_off(span, module, values)
        elif boundary.wakes >= 0:
            self._turn_on(off, boundary)

    def end(self) -> None:
        """The call ends well."""
        off = self._off
        if off is not None:
            self._count(off, None)

    def _turn_off(self, span: Span, module: torch.nn.Module, values: Any) -> None:
        first, packer = span.first, self._engine.packer
        if (
            packer.book.position != first.first
            or module.training is not first.training
            or facts_of(values) != first.arguments
            or hook_stack.owner_of_top() is not self._pair
        ):
            return
        hook_stack.pop()
        self._off = span
        packer.book.skip(span.n_places)
        if span.resting:
            packer.rest_unseen(span.resting)

    def _turn_on(self, off: Span, boundary: Boundary) -> None:
        if hook_stack.top(True) is not None:
            return  # somebody has put hooks there, and will take off the top ones
        self._off = None
        self._count(off, boundary)
        self._engine.packer.book.go_to(boundary.wakes)
        hook_stack.push(self._pair.pack, self._engine.unpack)

    def _count(self, off: Span, end: Boundary | None) -> None:
        self._engine.counters.unseen.append(off.unseen)
        if off.ends is not end:
            self.changed = True
