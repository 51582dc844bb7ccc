"""The tensors saved last, which stay on the device as long as the budget allows."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cswap.engine.handle import Token


class Window:
    """Backward wants the newest first, so what falls out of the window is the oldest.

    Attributes:
        open: whether anything may stay at all.
    """

    def __init__(self, budget: int | None, keep_last: int) -> None:
        """Args: budget: bytes that may stay, None: no limit; keep_last: tensors that always do."""
        self.open = budget is not None or keep_last > 0
        self._budget = budget
        self._keep_last = keep_last
        self._tokens: deque[tuple[weakref.ref[Token], int]] = deque()
        self._nbytes = 0

    def add(self, token: Token, nbytes: int) -> list[Token]:
        """Let a tensor in; the ones that have to leave for it, which may be that one."""
        leaving: list[Token] = []
        self._tokens.append((weakref.ref(token), nbytes))
        self._nbytes += nbytes
        while len(self._tokens) > self._keep_last and (
            self._budget is None or self._nbytes > self._budget
        ):
            reference, size = self._tokens.popleft()
            self._nbytes -= size
            oldest = reference()
            if oldest is not None:
                leaving.append(oldest)
        return leaving

    def recount(self) -> None:
        """Add up the bytes again, after an interrupt."""
        self._nbytes = sum(size for _, size in self._tokens)
