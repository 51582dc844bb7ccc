"""Which tensors stay within a budget: `Newest`.

Backward needs first what was saved last. Which tensors these are is known from the step before. So
the others leave as soon as they are saved, while forward still runs. A step that differs from the
recorded one is followed by one that is recorded anew, and the tensors that the record does not know
leave: the budget holds in every step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from cswap.engine.order.step_order import MOST_CALLS

if TYPE_CHECKING:
    from collections.abc import Collection

    from cswap.engine.order.looks import Key

AT_A_TIME: Final = 3
"""Largest tensors that may be on their way over a link: a part of the budget is theirs."""

LINK_SHARE: Final = 4
"""That part is at most 1/LINK_SHARE of it."""


class Newest:
    """Of one engine. Used under its lock, and by the thread of its model.

    Attributes:
        open: whether anything may stay at all.
        budget_bytes: that may stay; None: no limit.
        looks: whether the step that has begun is recorded: its tensors go the general way.
    """

    def __init__(self, budget: int | None, keep_last: int) -> None:
        """Args: budget: bytes that may stay, None: no limit; keep_last: tensors that always do."""
        self.open = self.looks = budget is not None or keep_last > 0
        self.budget_bytes = budget
        self._keep_last = keep_last
        self._recorded: dict[tuple[int, int], int] = {}  # bytes by call and position
        self._counts: dict[int, int] = {}  # tensors by call
        self._staying: dict[int, set[Key]] = {}  # by call
        self._staying_bytes = self._held_bytes = 0
        self._missed = self._is_far = False

    @property
    def rest_bytes(self) -> int | None:
        """Bytes of the budget that are left for tensors on their way; None: there is no limit."""
        if self.budget_bytes is None:
            return None
        return max(0, self.budget_bytes - max(self._staying_bytes, self._held_bytes))

    def of_call(self, call: int) -> Collection[Key]:
        """Position and bytes of the tensors that stay. Args: call: of the model, in this step."""
        return self._staying.get(call, ())

    def begin_call(self, ended: int, n_saved: int, call: int) -> None:
        """A forward begins.

        Args:
            ended: number of the call before, which has saved tensors.
            n_saved: how many.
            call: number of the one that begins; 0: a step begins.
        """
        if self.looks:
            self._counts[ended] = n_saved
        elif self._counts.get(ended) != n_saved:
            self._missed = True
        if call:
            return
        if self.looks:
            self._choose()
        self.looks = self._missed or ended != max(self._counts)
        if self.looks:
            self._recorded, self._counts, self._missed = {}, {}, False
            self._held_bytes = 0

    def keeps(self, call: int, position: int, nbytes: int, *, is_far: bool) -> bool:
        """Whether a tensor that is being saved stays.

        Args:
            call: of the model, in this step.
            position: of the tensor, in the call.
            nbytes: of its memory.
            is_far: whether it would leave over a link.
        """
        known = self._staying.get(call, ())
        if not self.looks:
            self._missed = self._missed or self._recorded.get((call, position)) != nbytes
            return (position, nbytes) in known
        if call == MOST_CALLS:  # one of many
            return False
        self._is_far = self._is_far or is_far
        self._recorded[call, position] = nbytes
        limit, held = self.budget_bytes, self._held_bytes + nbytes
        stays = any(position == p for p, _ in known) and (limit is None or held <= limit)
        if stays:
            self._held_bytes = held
        return stays

    def skips(self, call: int, position: int) -> None:
        """A tensor is not held at all: its bytes are free for others from the next record on."""
        self._missed = self._missed or (not self.looks and (call, position) in self._recorded)

    def _choose(self) -> None:
        recorded, limit = self._recorded, self.budget_bytes
        self._staying, self._staying_bytes = defaultdict(set), 0
        if limit is not None and self._is_far and sum(recorded.values()) > limit:
            limit -= min(AT_A_TIME * max(recorded.values()), limit // LINK_SHARE)
        for n, ((call, position), nbytes) in enumerate(reversed(recorded.items())):
            total = self._staying_bytes + nbytes
            if n >= self._keep_last and (limit is None or total > limit):
                return
            self._staying[call].add((position, nbytes))
            self._staying_bytes = total
