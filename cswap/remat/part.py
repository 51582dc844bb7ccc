"""`Part`: how an argument is read off a result. See copies.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cswap.remat.reads import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """How an argument is read off a result.

    Attributes:
        read: takes the result, the operands, then the constants; returns new memory. None: the
            result is copied as it is.
        sizes: of the argument.
        inputs: numbers of the operator's operands among the record's inputs.
        constants: its saved numbers.
        place: dimension of a stack and number in it, where the result lies; None: it is no stack.
    """

    read: Callable[..., torch.Tensor] | None
    sizes: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    constants: tuple[object, ...] = ()
    place: tuple[int, int] | None = None

    def of(self, result: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The part, in new memory, without a history.

        Args:
            result: that is saved.
            inputs: of the record, unpacked.

        Raises:
            NotFoundError: it cannot be read off.
        """
        operands = [inputs[n] for n in self.inputs]
        with torch.no_grad():
            result = result.detach()
            if self.place is not None:
                result = result.select(*self.place)
            if self.read is None:
                return result.clone(memory_format=torch.contiguous_format)
            found = self.read(result, *operands, *self.constants)
        if found.shape != self.sizes:
            raise NotFoundError
        return found
