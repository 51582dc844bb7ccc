"""The current thread's stack of saved-tensor hooks: torch has no public functions for it.

Note [the top of the stack before torch 2.8]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Before 2.8, torch does not tell which hooks are on top. All of torch's own code pushes and pops them
by two functions of a module, which are looked up there at each call. So for these versions both are
replaced by functions that keep a list besides. Hooks that were pushed before cswap was imported are
not in it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Pair: TypeAlias = "tuple[Callable[..., Any], Callable[..., Any]]"

_autograd: Final[Any] = torch._C._autograd  # noqa: SLF001


class _Pushed(threading.local):
    def __init__(self) -> None:
        self.pairs: list[Pair] = []


def _watch() -> Callable[[bool], Pair | None]:
    # See the Note.
    push_hooks = _autograd._push_saved_tensors_default_hooks  # noqa: SLF001
    pop_hooks = _autograd._pop_saved_tensors_default_hooks  # noqa: SLF001
    pushed = _Pushed()

    def push(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        push_hooks(pack, unpack)
        pushed.pairs.append((pack, unpack))

    def pop() -> None:
        pop_hooks()
        if pushed.pairs:
            pushed.pairs.pop()

    def top(_ignore_tracing: bool) -> Pair | None:
        return pushed.pairs[-1] if pushed.pairs else None

    _autograd._push_saved_tensors_default_hooks = push  # noqa: SLF001
    _autograd._pop_saved_tensors_default_hooks = pop  # noqa: SLF001
    return top


top: Final[Callable[[bool], Pair | None]] = (
    getattr(_autograd, "_top_saved_tensors_default_hooks", None) or _watch()
)
"""The pair on top; None: there is none. False: nor is there while a graph is traced."""

push: Final[Any] = _autograd._push_saved_tensors_default_hooks  # noqa: SLF001
"""Put a pack and an unpack hook on top. Inside of `torch.func.grad` it raises a RuntimeError."""

pop: Final[Any] = _autograd._pop_saved_tensors_default_hooks  # noqa: SLF001
"""Take the hooks on top off."""


def owner_of_top() -> object:
    """The object whose method is the pack hook on top; None: there is none, or it is a function."""
    hooks = top(True)
    return None if hooks is None else getattr(hooks[0], "__self__", None)
