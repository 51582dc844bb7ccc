"""Errors of cswap.

* CswapError
  + ConfigError           a setting or an argument is wrong; nothing was changed
    - UnknownCodecError   no codec of that name
    - UnsupportedError    this codec cannot take this tensor
    - TraceError          a trace contradicts itself, or its file cannot be read
    - HardwareError       a hardware profile is unknown, incomplete or impossible
    - BudgetError         no plan of this kind fits in the budget; carries the smallest that does
  + CorruptEncodingError  bytes that came back are not the bytes that were written
  + InternalError         cswap broke one of its own rules: please report
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class CswapError(Exception):
    """Base class of every error that cswap raises on purpose."""


class ConfigError(CswapError, ValueError):
    """An argument or a setting is wrong. Raised before anything was changed."""


class UnknownCodecError(ConfigError):
    """No codec of that name is registered.

    >>> raise UnknownCodecError("zcv", known=("raw", "zvc"))
    Traceback (most recent call last):
    ...
    cswap.errors.UnknownCodecError: codec='zcv': no such codec. Did you mean 'zvc'? Known: raw, zvc.
    """

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"codec={name!r}: no such codec.{hint} Known: {', '.join(known)}.")
        self.name = name


class UnsupportedError(ConfigError):
    """A codec was given a tensor (dtype, device, layout) that it does not take."""


class TraceError(ConfigError):
    """A trace contradicts itself or cannot be read; the message names the field."""


class HardwareError(ConfigError):
    """A hardware profile is unknown, incomplete or impossible; the message names the field."""


class BudgetError(ConfigError):
    """No plan fits in the budget.

    Attributes:
        budget_bytes: what was asked for.
        smallest_bytes: the smallest budget that does; None if that is not known.
    """

    def __init__(self, budget_bytes: int, smallest_bytes: int | None, why: str) -> None:
        remedy = "" if smallest_bytes is None else f" The smallest that does: {smallest_bytes}."
        super().__init__(f"budget={budget_bytes} bytes: {why}{remedy}")
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class CorruptEncodingError(CswapError):
    """An encoding or a stream is truncated, damaged, or not one of cswap's."""


class InternalError(CswapError):
    """cswap broke one of its own rules."""
