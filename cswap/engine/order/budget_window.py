"""The tensors saved last, which stay on the device as long as the budget allows."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cswap.engine.saved.packed import Token


class BudgetWindow:
    """Backward wants the newest first, so the oldest falls out of the window.

    Attributes:
        open: whether anything may stay at all.
        budget_bytes: that may stay; None: no limit.
        nbytes: of the tensors in the window.
    """

    def __init__(self, budget: int | None, keep_last: int) -> None:
        """Args: budget: bytes that may stay, None: no limit; keep_last: tensors that always do."""
        self.open = budget is not None or keep_last > 0
        self.budget_bytes = budget
        self._keep_last = keep_last
        self._tokens: deque[tuple[weakref.ref[Token], int]] = deque()
        self.nbytes = 0

    def add(self, token: Token, nbytes: int) -> list[Token]:
        """Let a tensor in; the ones that have to leave for it, which may be that one."""
        leaving: list[Token] = []
        self._tokens.append((weakref.ref(token), nbytes))
        self.nbytes += nbytes
        while len(self._tokens) > self._keep_last and (
            self.budget_bytes is None or self.nbytes > self.budget_bytes
        ):
            reference, size = self._tokens.popleft()
            self.nbytes -= size
            oldest = reference()
            if oldest is not None:
                leaving.append(oldest)
        return leaving

    def recount(self) -> None:
        """Add up the bytes again, after an interrupt."""
        self.nbytes = sum(size for _, size in self._tokens)

    def begin_step(self) -> None:
        """Forget the tensors that are gone."""
        if any(reference() is None for reference, _ in self._tokens):
            self._tokens = deque(entry for entry in self._tokens if entry[0]() is not None)
            self.recount()
