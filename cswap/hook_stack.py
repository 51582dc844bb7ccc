"""The current thread's stack of saved-tensor hooks: torch has no public functions for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Pair = tuple[Callable[..., Any], Callable[..., Any]]

push: Final[Any] = torch._C._autograd._push_saved_tensors_default_hooks  # noqa: SLF001
"""Put a pack and an unpack hook on top. Inside of `torch.func.grad` it raises a RuntimeError."""

pop: Final[Any] = torch._C._autograd._pop_saved_tensors_default_hooks  # noqa: SLF001
"""Take the hooks on top off."""

top: Final[Callable[[bool], Pair | None]] = torch._C._autograd._top_saved_tensors_default_hooks  # noqa: SLF001
"""The pair on top; None: there is none. False: nor is there while a graph is traced."""


def owner_of_top() -> object:
    """The object whose method is the pack hook on top; None: there is none, or it is a function."""
    hooks = top(True)
    return None if hooks is None else getattr(hooks[0], "__self__", None)
