"""A call site: the place in the model where a tensor was saved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Site:
    """The place where a tensor was saved, as far as cswap can tell.

    Attributes:
        scope: path of the module; "" outside of modules.
        kind: class of the module.
        operator: the torch function that the user's code called, if that is recorded.
        producer: autograd node that produced the tensor, "" for a leaf.
        codec: forced for this module or operator by the ``codec`` option.
    """

    scope: str = ""
    kind: str = ""
    operator: str = ""
    producer: str = ""
    codec: str | None = None
