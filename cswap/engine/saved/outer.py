"""`Outer`: a wrapper that autograd saves, without its parts. See apart.py."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Outer:
    """A wrapper that autograd saves, without its parts.

    Attributes:
        kind: its class.
        settings: all but its parts, by its class.
        sizes, strides: its own; symbolic if it is jagged.
        version: at which it was saved.
        counter: counts the versions with it, and holds no memory.
        owner: the wrapper of which it is a view, or itself.
    """

    __slots__ = ("counter", "kind", "owner", "settings", "sizes", "strides", "version")

    def __init__(self, tensor: torch.Tensor, settings: object, counter: torch.Tensor) -> None:
        """See the attributes."""
        base = tensor._base  # noqa: SLF001
        self.kind: Any = type(tensor)
        self.settings, self.counter = settings, counter
        self.sizes, self.strides = tensor.size(), tensor.stride()
        self.version = tensor._version  # noqa: SLF001
        self.owner = weakref.ref(tensor if base is None else base)
