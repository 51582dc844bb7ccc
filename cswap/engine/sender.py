"""From a handle to the way that its tensor is held: the last part of pack.

A tensor stays, is computed again, or is encoded. The advisor decides, or the goal (`Chooser`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.advisor.live_costs import KEEP, REMAT
from cswap.advisor.site_history import Advice
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec
from cswap.codecs.tolerance import EXACT, needed_tolerance
from cswap.codecs.warmup import WARM, warm
from cswap.engine.order.chooser import Choice
from cswap.engine.order.looks import Stay
from cswap.engine.recomputer import computes_again
from cswap.engine.saved.operators import EXCLUDED, LEFT_OUT
from cswap.engine.saved.without_handle import SharedUse
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.stored import INDICES

if TYPE_CHECKING:
    import torch

    from cswap.advisor.cost import Candidate
    from cswap.codecs.base import Codec
    from cswap.engine.recipes import Place
    from cswap.engine.saved.packed import Token
    from cswap.engine.state import EngineState
    from cswap.engine.transfer.handle import Handle


FIRST_STEPS: Final = 4
"""Steps in which is seen whether casts of parameters can be computed again (saved/leaves.py)."""

BY_BUDGET: Final = "budget"
"""Reason of a tensor that stays within the budget."""

BY_PLAN: Final = "plan"
"""Reason of a tensor that stays because a plan says so."""

BY_SELECTOR: Final = (EXCLUDED, LEFT_OUT)
"""Reasons of tensors that take nothing of the budget."""


class Sender:
    """Decides for the handles of one engine, and sends them.

    Attributes:
        remat: whether tensors may be computed again because that pays; a plan says it itself.
    """

    def __init__(self, state: EngineState) -> None:
        """Args: state: the engine's."""
        self._state = state
        self._counters, self._lock, self._newest = state.counters, state.lock, state.newest
        self._order, self._recomputer = state.order, state.recomputer
        self._may_compute = computes_again(state.config)
        self.remat = self._may_compute and state.config.plan is None
        # Where encodings have a limit, prices follow the demand of every tensor in every step.
        self._may_stay = state.config.policy == "auto" and state.config.host_limit is None

    def send(self, token: Token, place: Place) -> None:
        """Decide how to hold a tensor, and let it leave if it is to. Args: place: in the step."""
        fresh = place.stay is not None and not place.stay.shares
        place.stay = place.shared_use = None
        reason = self._swap_out(token, place, fresh=fresh)
        handle = token.handle
        if reason == BY_BUDGET or (reason is not None and self._may_stay):
            key = handle.position, handle.raw_nbytes
            place.stay = token.stay = Stay(handle.step, reason, key)
        rest_bytes = self._newest.rest_bytes
        if rest_bytes is not None:
            # Tensors on their way out count, too: the budget is a limit, not a goal.
            token.lane.hold_within(rest_bytes)

    def _swap_out(
        self, token: Token, place: Place | None = None, *, fresh: bool = False
    ) -> str | None:
        # The reason why it stays in the next steps as well; None: nobody knows about these. place:
        # None for a tensor that leaves after all. fresh: see `Advisor.choose`.
        handle, source = token.handle, token.source
        if handle.state is not State.KEPT or source is None:
            return None
        if self._newest.open and handle.pinned not in BY_SELECTOR:
            is_far = not token.lane.device.unified
            with self._lock:
                call = self._order.call
                stays = self._newest.keeps(call, handle.position, handle.raw_nbytes, is_far=is_far)
            if stays:
                token.remat = None
                return self._leave_in_place(handle, BY_BUDGET)
        if handle.pinned:
            if handle.pinned == LEFT_OUT:  # it may leave after all
                self._counters.stay(EXCLUDED, handle.raw_nbytes)
                return EXCLUDED
            reason = self._leave_in_place(handle, handle.pinned)
            return None if reason == "outlives" else reason  # the program may soon let go of it
        if token.remat is not None:
            if self._recomputer.is_worth(token, fresh=fresh):
                self._compute_later(token)
                if place is not None:
                    _may_have_slot(place, token)
                return None
            token.remat = None
        if handle.is_cast:
            reason = self._leave_in_place(handle, "parameter")
            return None if handle.step < FIRST_STEPS else reason  # it may not always
        x = handle.elements(source)
        codec = self._choose(handle, x, may_keep=token.lane.may_keep, fresh=fresh)
        if codec is None:
            return self._leave_in_place(handle, "does_not_pay")
        self._encode(token, x, codec, place)
        return None

    def leave_after_all(self, token: Token) -> None:
        """Let a tensor leave that was `LEFT_OUT`: an operator that is included has saved it."""
        token.handle.pinned, token.stay = "", None
        self._counters.stay(EXCLUDED, token.handle.raw_nbytes, -1)
        self._swap_out(token)

    def _leave_in_place(self, handle: Handle, reason: str) -> str:
        handle.tolerance = EXACT
        self._counters.stay(reason, handle.raw_nbytes)
        return reason

    def _encode(self, token: Token, x: torch.Tensor, codec: Codec, place: Place | None) -> None:
        # Whoever has chosen the codec, this is the place that asks whether this tensor may have it.
        handle, lane = token.handle, token.lane
        refusal = _refusal(codec, x, handle.tolerance)
        if refusal is not None:
            self._counters.fall_back(f"{codec.name}:choice", refusal)
            codec = get_codec("raw")
        handle.tolerance = EXACT if codec.lossless else needed_tolerance(codec)
        if (codec.name, x.dtype, x.device) not in WARM:
            self._counters.compiled(warm(codec, x.dtype, x.device))
        lane.executor.swap_out(handle, x, codec, place)
        if place is not None and _is_alone(token, codec, x.dtype):
            _may_have_slot(place, token, codec)

    def obey(self, token: Token, tensor: torch.Tensor, place: Place) -> bool:
        """Do what a goal decides for a tensor, or decided for the last one of its place.

        Returns:
            Whether it has decided.
        """
        handle, source = token.handle, token.source
        if handle.state is not State.KEPT or source is None or handle.pinned or handle.modified():
            return False
        chooser, choice = self._state.chooser, place.choice
        if chooser is not None:
            choice = place.choice = chooser.choose(
                tensor,
                handle,
                lambda: self._seconds_again(token, tensor, place),
                lambda: self._candidates(handle, source),
            )
        elif (
            choice is not None
            and choice.action == REMAT
            and self._seconds_again(token, tensor, place) is None
        ):
            token.remat = None
        if choice is None or self._is_forbidden(choice, handle):
            return False
        if choice.action == REMAT and token.remat is not None:
            self._compute_later(token)
            _may_have_slot(place, token)
            return True
        token.remat = None
        if choice.action in (KEEP, REMAT):
            handle.tolerance = EXACT
            self._counters.stay("goal", handle.raw_nbytes)
            return True
        x = handle.elements(source)
        handle.advice = choice.notes
        self._encode(token, x, get_codec(choice.action), place)
        return True

    def keep(self, token: Token, place: Place) -> None:
        """Let a tensor stay, as a plan says."""
        handle = token.handle
        key = handle.position, handle.raw_nbytes
        place.shared_use = place.choice = None
        place.stay = token.stay = Stay(handle.step, self._leave_in_place(handle, BY_PLAN), key)

    def recompute(self, token: Token, tensor: torch.Tensor, place: Place) -> None:
        """Compute a tensor again, as a plan says; send it if no chain of operators makes it."""
        handle = token.handle
        if handle.state is State.KEPT and not handle.pinned and not handle.modified():
            if self._seconds_again(token, tensor, place) is not None:
                place.choice = Choice(REMAT)
                self._compute_later(token)
                _may_have_slot(place, token)
                return
            token.remat = place.choice = None
            why = f"no chain of operators makes tensor {handle.position} again"
            self._counters.fall_back("plan:recompute", why, "such tensors are swapped")
        self.send(token, place)

    def _compute_later(self, token: Token) -> None:
        token.lane.executor.recompute_later(token.handle)
        self._state.reclaimer.release_later(token)

    def _is_forbidden(self, choice: Choice, handle: Handle) -> bool:
        # By the guard, since the choice was made.
        goal = self._state.goal
        if self._state.chooser is goal or choice.action in (KEEP, REMAT) or handle.site is None:
            return False
        codec = get_codec(choice.action)
        if codec.lossless or self._state.advisor.milder.allows(handle.site.kind, codec.name):
            return False
        if goal is not None:
            goal.missed()
        return True

    def _seconds_again(self, token: Token, tensor: torch.Tensor, place: Place) -> float | None:
        if self._may_compute:
            token.remat = self._recomputer.find(tensor, token.handle, place, for_goal=True)
        return self._recomputer.seconds(token)

    def _candidates(self, handle: Handle, source: torch.Tensor) -> tuple[Candidate, ...]:
        if handle.is_cast:
            return ()
        x = handle.elements(source)
        self._choose(handle, x, may_keep=True)
        return handle.advice.candidates if isinstance(handle.advice, Advice) else ()

    def _choose(
        self, handle: Handle, x: torch.Tensor, *, may_keep: bool, fresh: bool = False
    ) -> Codec | None:
        assert handle.site is not None  # set where the handle is made
        planned = handle.planned
        try:
            advice = self._state.advisor.choose(
                x,
                handle.site,
                handle.position,
                tolerance=handle.tolerance,
                may_keep=may_keep,
                fresh=fresh,
                planned=None if planned is None else planned.decision.codec,
            )
        except Exception as error:
            self._counters.fall_back("advisor", error)
            return get_codec("raw")
        handle.advice = advice
        return advice.codec


def _refusal(codec: Codec, x: torch.Tensor, tolerance: int) -> str | None:
    # Why a codec may not encode a tensor; None: it may.
    if not takes(codec, x.dtype, x.device.type):
        return f"it does not take {x.dtype}"
    if not codec.lossless and needed_tolerance(codec) > tolerance:
        return "it is lossy, and more so than the tensor forgives"
    return None


def _may_have_slot(place: Place, token: Token, codec: Codec | None = None) -> None:
    # The next tensor of this place may do without a handle, by a slot (replay/replay.py), if nobody
    # asks for that of this one. codec: that has encoded it; None: it is computed again.
    place.shared_use = token.shared_use = SharedUse()
    place.codec, place.notes = codec, None if codec is None else token.handle.advice


def _is_alone(token: Token, codec: Codec, dtype: torch.dtype) -> bool:
    # Whether it is nothing but an encoding in host memory, of the whole of its storage; made, or
    # ordered to be made, when pack returns.
    handle = token.handle
    if handle.state is not State.STORED or handle.codec is not codec:
        return False
    if not handle.whole or handle.gathered:
        return False
    stored = handle.stored
    if stored is None:  # over a link
        passage = token.passage
        return passage is not None and passage.checksum is None
    if stored.host is None:
        return False
    # Without a handle, nothing but the payloads of indices is compared.
    return not stored.checked or (stored.checked == "payload" and dtype in INDICES)
