"""`Box`: a wrapper subclass of two plain tensors, for tests of saved/apart.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map, tree_map_only

if TYPE_CHECKING:
    from typing_extensions import Self


class Box(torch.Tensor):
    """Values, and a plain tensor beside them to which every operator is applied, too."""

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls, left.size(), left.stride(), left.storage_offset(), dtype=left.dtype,
            device=left.device,
        )  # fmt: skip

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["left", "right"], "box"

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Any], settings: object, *_: object) -> Box:
        assert settings == "box"
        return cls(parts["left"], parts["right"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # its arguments have no types there
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def run(name: str) -> Any:
            part = lambda x: getattr(x, name)  # noqa: E731
            return func(*tree_map_only(Box, part, args), **tree_map_only(Box, part, kwargs or {}))

        left, right = run("left"), run("right")
        if args and left is getattr(args[0], "left", None):  # in place
            return args[0]
        pairs = iter(_tensors(right))
        return tree_map(lambda x: cls(x, next(pairs)) if isinstance(x, torch.Tensor) else x, left)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]


class Wrap(torch.autograd.Function):
    """A box in the memory of a plain tensor, as DTensor.from_local makes one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Box:
        return Box(x.view_as(x), x.neg())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> torch.Tensor:
        return grad.left if isinstance(grad, Box) else grad


class Unwrap(torch.autograd.Function):
    """The plain tensor in a box."""

    @staticmethod
    def forward(ctx: Any, box: Box) -> torch.Tensor:
        return box.left.view_as(box.left)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Box:
        return Box(grad, grad.neg())


def wrap(x: torch.Tensor) -> Box:
    """A box that shares the memory of x."""
    box: Box = Wrap.apply(x)
    return box


def unwrap(box: torch.Tensor) -> torch.Tensor:
    """The plain tensor in a box, in its memory."""
    plain: torch.Tensor = Unwrap.apply(box)
    return plain
