"""Memory that is decoded ahead of its use: `Ahead`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from cswap.devices.base import Event


class Ahead(NamedTuple):
    """Memory that a side stream decodes into; not to be let go before that has been joined.

    Attributes:
        result: [n] flat; strided if the handle is gathered.
        decoded: fires when it holds the values.
        issued: the moment on the compute stream at which it was allocated.
        flat: [n] memory from which the result is gathered on the side stream; None: the result is
            flat.
    """

    result: torch.Tensor
    decoded: Event
    issued: Event
    flat: torch.Tensor | None = None
