"""A call site: where a tensor was saved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Site:
    """Where a tensor was saved, as far as it can be known.

    Attributes:
        scope: path of the module, "" outside any.
        kind: class of the module.
        operator: the torch function that the user's code called, where that is recorded.
        producer: autograd node that produced the tensor, "" for a leaf.
        codec: forced for this module by the ``codec`` option.
    """

    scope: str = ""
    kind: str = ""
    operator: str = ""
    producer: str = ""
    codec: str | None = None
