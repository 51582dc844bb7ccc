"""Parameters from which their casts are computed again: `Leaves`.

Note [a parameter may change before backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autocast makes a copy of each weight in a lower precision, and autograd holds it until backward. It
is computed again from the weight, which exists anyway, and which may change:

* before the cast is saved. Whoever keeps autocast's cache from step to step saves casts of earlier
  values. So the node of the cast has to be of this step, and the parameter has to be as it was when
  the step began.
* after that. In front of each step of torch's optimizers, the casts of its parameters that wait
  for a backward are made. If somebody else writes the parameter, backward raises an error. So that
  no program meets it that does this in every step, a cast is computed again only if nobody but the
  optimizer has written its parameter in the step before. Without an optimizer of torch, none is.

A parameter whose memory was replaced (``.data``) counts as written.
"""

from __future__ import annotations

import weakref
from collections import deque
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cswap.remat.reads import HeldLeaf, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable

_next_number = torch._C._autograd._get_sequence_nr  # noqa: SLF001

_State: TypeAlias = tuple[int, int, torch.dtype]
"""Version, address and dtype of a parameter."""


class _Known:
    """A parameter whose casts are saved.

    Attributes:
        leaf: the parameter.
        begun: its state when the step began, or when it was saved first.
        is_clean: whether it was in that state still when an optimizer came to it last.
    """

    __slots__ = ("begun", "is_clean", "leaf")

    def __init__(self, leaf: torch.Tensor) -> None:
        self.leaf = weakref.ref(leaf)
        self.begun = _state(leaf)
        self.is_clean = False


class KeptLeaf(HeldLeaf):
    """A parameter with the value that it had in forward.

    Attributes:
        tensor: the parameter; or its cast, if an optimizer has changed it since.
    """

    __slots__ = ("__weakref__", "_dtype", "_state", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self.tensor, self._dtype = tensor, dtype
        self._state = _state(tensor)

    def unpack(self) -> torch.Tensor:
        """See `HeldLeaf.unpack`.

        Raises:
            RuntimeError: it was written, or its memory was replaced, since forward.
        """
        if _state(self.tensor) != self._state:
            raise RuntimeError(
                "a saved cast is to be computed again from a parameter of shape "
                f"{[*self.tensor.shape]} that has been modified by an inplace operation, or "
                "whose memory was replaced, since forward. remat=False holds casts."
            )
        return self.tensor

    def cast(self, casts: dict[tuple[int, torch.dtype], torch.Tensor]) -> None:
        """Hold the cast: the parameter is about to be written.

        Args:
            casts: made for other graphs, by the parameter's identity and their dtype.
        """
        if _state(self.tensor) != self._state:  # `unpack` will raise
            return
        key = id(self.tensor), self._dtype
        if key not in casts:
            casts[key] = self.tensor.detach().to(self._dtype, copy=True)
        self.tensor = casts[key]
        self._state = _state(self.tensor)


class Leaves:
    """The parameters of one engine whose casts are saved. See the top.

    Attributes:
        known: by identity.
    """

    def __init__(self) -> None:
        self.known: dict[int, _Known] = {}
        self._held: deque[weakref.ref[KeptLeaf]] = deque()
        self._thread = 0
        self._several = self._is_hooked = False
        self._first = 0  # sequence number of the step's first node

    def begin_step(self) -> None:
        """A step begins, in this thread."""
        thread = get_ident()
        # Another one may train the same parameters meanwhile.
        self._several = self._several or self._thread not in (0, thread)
        self._thread, self._first = thread, _next_number()
        for key, known in tuple(self.known.items()):
            leaf = known.leaf()
            if leaf is None:
                self.known.pop(key, None)
            else:
                known.begun = _state(leaf)
        self._forget()

    def hold(self, leaf: torch.Tensor, dtype: torch.dtype, number: int) -> KeptLeaf:
        """Hold a parameter instead of its cast.

        Args:
            leaf: the parameter, strided.
            dtype: of the cast.
            number: sequence number of the cast's node.

        Raises:
            NotFoundError: the cast may be of another value.
        """
        known = self.known.get(id(leaf))
        if known is None or known.leaf() is not leaf:
            self.known[id(leaf)] = _Known(leaf)
            if not self._is_hooked:
                self._is_hooked = True
                hook = register_optimizer_step_pre_hook(_PreHook(weakref.ref(self)))
                weakref.finalize(self, hook.remove)
            raise NotFoundError
        if (
            self._several
            or not known.is_clean
            or number < self._first
            or get_ident() != self._thread
            or known.begun != _state(leaf)
        ):
            raise NotFoundError
        held = KeptLeaf(leaf, dtype)
        self._held.append(weakref.ref(held))
        return held

    def before_step(self, parameters: Iterable[Any]) -> None:
        """An optimizer is about to write these."""
        written: set[int] = set()
        for parameter in parameters:
            known = self.known.get(id(parameter))
            leaf = None if known is None else known.leaf()
            if known is not None and leaf is not None and leaf is parameter:
                written.add(id(leaf))
                known.is_clean = known.begun == _state(leaf)
        if not written:
            return
        self._forget()
        casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        for reference in tuple(self._held):
            held = reference()
            if held is not None and id(held.tensor) in written:
                held.cast(casts)

    def _forget(self) -> None:
        # Those for which no backward waits any more.
        held = self._held
        for _ in range(len(held)):
            try:
                reference = held.popleft()
            except IndexError:  # another thread took it
                return
            if reference() is not None:
                held.append(reference)


class _PreHook:
    """The hook in front of each optimizer's step. It keeps no engine alive."""

    def __init__(self, leaves: weakref.ref[Leaves]) -> None:
        self._leaves = leaves

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        leaves = self._leaves()
        if leaves is not None:
            leaves.before_step(p for group in optimizer.param_groups for p in group["params"])


def _state(leaf: torch.Tensor) -> _State:
    return leaf._version, leaf.data_ptr(), leaf.dtype  # noqa: SLF001
