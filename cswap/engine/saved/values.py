"""Results that other operators than their own save: `SavedValues`.

Note [a value that another operator saves]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A sum needs nothing for its backward, so autograd's node of ``x + f(x)`` leads to the node that made
``x``, and not to its value. But a norm before it has saved ``x``. So the node that made a tensor is
told which packed object holds it, in torch's own dictionary for notes on a node, which lives as
long as the node. The note does not keep the object alive, nor does the object keep the node.

The object has the value that the node gave the tensor: its version is 0, so nobody has written
since that autograd knows of. If somebody writes later, the object says so when it is asked.

Where a slot takes the tensor, or a plan lets it stay, its place says whether it is worth a note.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from cswap.engine.recipes import Place


class SavedValues:
    """The notes of one engine on autograd's nodes."""

    def note(self, tensor: torch.Tensor, packed: object, place: Place | None) -> None:
        """A tensor has been packed.

        Args:
            tensor: as autograd saves it.
            packed: holds it.
            place: where in the step it was saved.
        """
        node: Any = tensor.grad_fn
        if node is not None and not (tensor.output_nr or tensor._version):  # noqa: SLF001
            before = node.metadata.get(self)
            if before is None or before[0]() is None:
                node.metadata[self] = weakref.ref(packed), place

    def of(self, notes: dict[Any, Any]) -> object | None:
        """The packed object of a node's first result; None: nobody has saved it, or it is gone.

        Args:
            notes: ``metadata`` of the node.
        """
        found = notes.get(self)
        if found is None:
            return None
        packed, place = found
        held: object | None = packed()
        if place is not None and held is not None:
            place.is_value = True
        return held
