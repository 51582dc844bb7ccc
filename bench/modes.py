"""The four ways to train that the demo compares, and what each of them can tell about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cswap

if TYPE_CHECKING:
    from cswap.api import Installation

    from bench.models import Net


def switch_on(mode: str, model: Net) -> Installation | None:
    """Switch a mode on for a model; return cswap's handle if the mode has one."""
    model.checkpointed = mode == "checkpoint"
    if mode == "lossless":
        return cswap.install(model)
    if mode == "int8":
        return cswap.install(model, lossy="int8")
    return None


def encoded_bytes(handle: Installation | None) -> int:
    """Bytes that the mode's encodings hold now."""
    if handle is None:
        return 0
    raise NotImplementedError


def report(handle: Installation | None) -> dict[str, Any] | None:
    """What cswap says of itself: its statistics, None for a mode without cswap."""
    return None if handle is None else handle.stats.to_dict()
