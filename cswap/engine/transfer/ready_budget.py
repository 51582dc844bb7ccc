"""Bounds the decoded memory that waits to be asked for (again)."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cswap.engine.link.link import Link
    from cswap.engine.transfer.handle import Handle


class ReadyBudget:
    """Bounds the decoded memory that waits to be asked for (again).

    Attributes:
        waiting: accounts of tensors whose decoded memory waits, by their identity; the oldest
            first.
    """

    def __init__(self, limit_bytes: int, link: Link | None) -> None:
        """Args: limit_bytes: decoded bytes that may wait; link: bounds them as well."""
        self._most, self._link = limit_bytes, link
        self.waiting: OrderedDict[int, Handle] = OrderedDict()
        self._bytes = 0

    def add(self, saved: Handle) -> list[Handle]:
        """Count a tensor's decoded memory; returns the ones to drop to stay within the limit."""
        if id(saved) not in self.waiting:
            self.waiting[id(saved)] = saved
            self._bytes += saved.raw_nbytes
        dropped: list[Handle] = []
        limit = self._most
        if self._link is not None:
            limit = min(limit, self._link.ahead.most_bytes)
        while self._bytes > limit and len(self.waiting) > 1:
            _, oldest = self.waiting.popitem(last=False)
            self._bytes -= oldest.raw_nbytes
            dropped.append(oldest)
        return dropped

    def remove(self, saved: Handle) -> None:
        """The tensor's decoded memory waits no more."""
        if self.waiting.pop(id(saved), None) is not None:
            self._bytes -= saved.raw_nbytes

    def recount(self) -> None:
        """Add up the bytes again, after an interrupt."""
        self._bytes = sum(saved.raw_nbytes for saved in self.waiting.values())
