"""Errors of cswap.

* CswapError
  + ConfigError           a setting or an argument is wrong; nothing was changed
    - UnknownCodecError   no codec of that name
    - UnsupportedError    this codec cannot take this tensor
    - TraceError          a trace contradicts itself, or its file cannot be read
    - HardwareError       a hardware profile is unknown, incomplete or impossible
    - BudgetError         no plan of this kind fits in the budget; carries the smallest that does
  + GoalError             a memory goal cannot be reached; carries the smallest that can
  + ValuesGoneError       the values of a saved tensor are not held, since backward reads none
  + CorruptEncodingError  bytes that came back are not the bytes that were written
  + InternalError         cswap broke one of its own rules: please report
"""

from __future__ import annotations

import copy
import difflib
from typing import TYPE_CHECKING, TypeVar

from cswap.display import MOST_SHOWN, shown, visible
from cswap.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class CswapError(Exception):
    r"""Base class of every error that cswap raises on purpose. Prints as one line.

    >>> print(CswapError("module 'conv\x1b[31m': \n is no name"))
    module 'conv\x1b[31m': \n is no name
    """

    def __str__(self) -> str:
        return visible(super().__str__())


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
        close = difflib.get_close_matches(name[:MOST_SHOWN], known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        listed = visible(", ".join(known))
        super().__init__(f"codec={shown(name)}: no such codec.{hint} Known: {listed}.")
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
        budget_bytes: the budget that was asked for.
        smallest_bytes: the smallest budget that does; None if that is not known.
    """

    def __init__(self, budget_bytes: int, smallest_bytes: int | None, why: str) -> None:
        remedy = "" if smallest_bytes is None else f" The smallest that does: {smallest_bytes}."
        super().__init__(f"budget={budget_bytes} bytes: {why}{remedy}")
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class GoalError(CswapError):
    """A step does not fit into the memory that ``fit=`` asks for.

    Attributes:
        asked_bytes: the goal.
        smallest_bytes: the smallest goal that can be reached, as far as is known; ``why`` names it.
    """

    def __init__(self, asked_bytes: int, smallest_bytes: int, why: str) -> None:
        super().__init__(f"fit={show_bytes(asked_bytes)}: {why}")
        self.asked_bytes = asked_bytes
        self.smallest_bytes = smallest_bytes


class ValuesGoneError(CswapError, RuntimeError):
    """Somebody asks for the values of a saved tensor that backward does not read: nobody has them.

    >>> try:
    ...     raise ValuesGoneError((2, 3), "torch.float32")
    ... except RuntimeError as error:
    ...     str(error)[:63]
    'the values of a saved tensor, torch.float32 [2, 3], are gone: i'
    """

    def __init__(self, sizes: Sequence[int], dtype: object) -> None:
        super().__init__(
            f"the values of a saved tensor, {dtype} {list(sizes)}, are gone: its operator's "
            "backward reads only its sizes, so cswap does not hold it. To look at the saved "
            "tensors of nodes, install with remat=False."
        )


class CorruptEncodingError(CswapError):
    """An encoding or a stream is truncated, damaged, or not one of cswap's."""


class InternalError(CswapError):
    """cswap broke one of its own rules."""


_E = TypeVar("_E", bound=BaseException)


def without_frames(error: _E) -> _E:
    """The same error, to be kept: without tracebacks, whose frames keep tensors alive."""
    seen: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue:
        one = queue.pop()
        if one is not None and not any(one is other for other in seen):
            seen.append(one)
            one.__traceback__ = None
            queue += (one.__cause__, one.__context__)
    return error


def to_raise(kept: BaseException) -> BaseException:
    """A copy of an error that is kept: raising the kept one would give it frames again.

    >>> kept = CorruptEncodingError("broken")
    >>> to_raise(kept) is kept, to_raise(kept)
    (False, CorruptEncodingError('broken'))
    """
    try:
        copied = copy.copy(kept)
    except Exception:  # a foreign exception whose constructor takes something else
        return CorruptEncodingError(f"{type(kept).__name__}: {kept}")
    copied.__cause__ = kept.__cause__
    return copied if type(copied) is type(kept) else CorruptEncodingError(str(kept))
