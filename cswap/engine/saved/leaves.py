"""Leaves from which tensors are computed again: `hold_leaf`.

Note [a parameter may change before backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autocast makes a copy of each weight in a lower precision, and autograd holds it until backward. It
is computed again from the weight, which exists anyway. The weight may change before that: an
optimizer runs while the graph of another forward waits for its backward. So in front of each step
of torch's optimizers, values of their parameters that wait for a backward are copied. If somebody
else writes a parameter meanwhile, backward raises an error.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from torch.optim.optimizer import register_optimizer_step_pre_hook

from cswap.engine.saved.packed import KeptParameter
from cswap.remat.reads import HeldLeaf

if TYPE_CHECKING:
    import torch

FREED: Final = (
    "a saved tensor is to be computed again, and the memory of an argument has been freed "
    "(untyped_storage().resize_(0)). remat=False stores such tensors."
)


class KeptLeaf(KeptParameter, HeldLeaf):
    """A leaf with the value that it had in forward."""

    __slots__ = ()

    def unpack(self) -> torch.Tensor:
        """The leaf, or a copy with its value.

        Raises:
            RuntimeError: it was written, or its memory was freed, since forward.
        """
        leaf = self.tensor
        if leaf._version != self.version:  # noqa: SLF001
            raise RuntimeError(
                f"a saved tensor is to be computed again from a parameter of shape {[*leaf.shape]} "
                "that has been modified by an inplace operation since forward: it is at version "
                f"{leaf._version}; expected version {self.version} instead. "  # noqa: SLF001
                "remat=False stores such tensors."
            )
        if leaf.untyped_storage().nbytes() < leaf.nbytes:  # FSDP frees it between its uses
            raise RuntimeError(FREED)
        return leaf

    def copy(self) -> None:
        """Hold a copy of the value: the leaf is about to be written."""
        if self.tensor._version == self.version:  # noqa: SLF001 - else `unpack` raises
            self.tensor = self.tensor.detach().clone()
            self.version = self.tensor._version  # noqa: SLF001


MOST_HELD: Final = 1 << 10
"""Leaves that are remembered before those are looked for that nobody needs any more."""

_held: Final[deque[weakref.ref[KeptLeaf]]] = deque()
_hooks: Final[list[object]] = []


def hold_leaf(leaf: torch.Tensor) -> KeptLeaf:
    """The packed object of a leaf. Args: leaf: strided, with memory. Thread-safe."""
    packed = KeptLeaf(leaf, leaf._version)  # noqa: SLF001
    _held.append(weakref.ref(packed))
    if len(_held) % MOST_HELD == 0:
        _forget()
    if not _hooks:  # a second one would find nothing to copy
        _hooks.append(register_optimizer_step_pre_hook(_copy))
    return packed


def _forget() -> None:
    # Those for which no backward waits any more.
    for _ in range(len(_held)):
        try:
            found = _held.popleft()
        except IndexError:  # another thread took it
            return
        if found() is not None:
            _held.append(found)


def _copy(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _forget()
    if _held:
        written = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for found in tuple(_held):
            packed = found()
            if packed is not None and id(packed.tensor) in written:
                packed.copy()
