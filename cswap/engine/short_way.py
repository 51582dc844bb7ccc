"""The short way of tensors at known places: out and back without a handle.

Note [computed again without a handle]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A tensor that is computed again holds no bytes: nothing is to be given back when it goes. Its handle
serves other tensors that use the same memory, and the decision between ways to hold the tensor. So
where the last tensor of a place was computed again, and nobody else needed its handle, the next
one gets a `Recomputed` and no handle, no token and no entry in a table. The graph around it is
compared with that of the last one (Note [a formula is recognised] in recognition.py). If it
differs, if a byte has become cheaper than the tensor's time, or if the limit of the step's time
keeps the tensor, it goes the whole way.

Where the last tensor was saved once more, at another place, that place goes the short way, too: see
Note [saved again without a handle] in without_handle.py.

If another tensor begins to use the same memory, the first one does not notice: both are held, each
in its own way, and each comes back with its own values. So in every `STEPS`-th step all places go
the whole way, and there such a use is seen.

Note [encoded without a handle]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The same holds for a tensor that is encoded in the thread that saves it. When its place is reached
again, the encoding is made before pack returns, so there is no state between two threads. The
tensor has to be the whole of its storage, and its encoding goes to the host store. Where a tensor
is checked by ``verify=``, goes to the disk, follows a plan, or is drawn on a timeline, it
goes the whole way, and so it does where the advisor has to look at it again. Indices are always
checked: without a handle they are only where a checksum follows their payload (checked_way.py).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import torch

from cswap.advisor.site_history import Advice
from cswap.codecs.base import DEFAULT_KEY, EncodeKey
from cswap.codecs.tolerance import EXACT, needed_tolerance
from cswap.engine.order.step_order import NO_BACKWARD
from cswap.engine.recomputer import are_aligned
from cswap.engine.replay.slot import InLineSlot
from cswap.engine.saved.aliases import ALIGNMENT, flat_whole, is_saved_again, whole_address
from cswap.engine.saved.away import Away
from cswap.engine.saved.encoded import Encoded
from cswap.engine.saved.packed import PackedView
from cswap.engine.saved.recomputed import Recomputed
from cswap.engine.saved.without_handle import Again, WithoutHandle
from cswap.engine.transfer.handle import State
from cswap.stats.counters import SAVED

if TYPE_CHECKING:
    from cswap.codecs.base import Codec
    from cswap.engine.recipes import Place
    from cswap.engine.saved.without_handle import SharedUse
    from cswap.engine.state import EngineState
    from cswap.engine.transfer.device_lanes import Lane
    from cswap.engine.transfer.in_line import Encoding, InLine
    from cswap.remat.record import Remat

_now = time.perf_counter
_current_backward = torch._C._current_graph_task_id  # noqa: SLF001

WORD: Final = 8
"""Bytes of the largest word. Memory of other libraries may begin anywhere."""

STEPS: Final = 64
"""In steps whose number is a multiple, all tensors go the whole way."""


class ShortWay:
    """Packs and unpacks the tensors of one engine that have no handles."""

    def __init__(self, state: EngineState) -> None:
        """Args: state: the engine's."""
        self._state = state
        self._lock, self._order, self._counters = state.lock, state.order, state.counters
        self._recomputer, self._advisor = state.recomputer, state.advisor
        self._limit = state.advisor.limit
        self._results = state.results

    def pack(self, tensor: torch.Tensor, place: Place) -> WithoutHandle | None:
        """The packed object of a tensor; None: it goes the whole way.

        Args:
            tensor: as autograd saves it.
            place: where in the step; its last tensor could have done without a handle.
        """
        start_s = _now()
        shared_use, lane = place.shared_use, place.recipe.lane
        assert shared_use is not None  # the caller has looked
        assert lane is not None  # or it would stay
        if shared_use.seen or not self._order.step % STEPS:
            place.shared_use = None
            return None
        packed: WithoutHandle | None
        if place.codec is None:
            packed = self._computed_again(tensor, place, lane, shared_use)
        else:
            packed = self._encoded(tensor, place, place.codec, lane, shared_use)
        if packed is None:
            return None
        with self._lock:
            packed.position, packed.step = self._order.next_position()
        if shared_use.again:
            packed.expect_others(tensor)
        if place.slot is None and isinstance(packed, Encoded):
            place.slot = InLineSlot.of(
                tensor, packed, place.notes, self._counters, self._state.reclaimer
            )
        packed.took_s = took_s = _now() - start_s
        self._counters.leaving_s += took_s
        return packed

    def _computed_again(
        self, tensor: torch.Tensor, place: Place, lane: Lane, shared_use: SharedUse
    ) -> WithoutHandle | None:
        for_goal = place.choice is not None
        if not for_goal and not self._is_worth(place, lane):
            place.shared_use = None
            return None
        if lane.may_capture and lane.device.is_capturing():
            return None
        formula = place.formula
        if formula is None or tensor.dtype is not formula.layout.dtype:
            return None
        if tensor.is_conj() or tensor.is_neg():  # other numbers than those in memory
            return None
        tolerance = place.recipe.tolerance
        finder = self._recomputer.finder(tolerance=tolerance, for_goal=for_goal)
        remat = finder.recognised(tensor, formula)
        if remat is None or (lane.ahead and not _is_at_hand(remat)):
            return None
        if formula.product and not are_aligned(remat):
            return None
        packed = Recomputed(tensor, place.recipe, remat, lane, shared_use, tolerance=tolerance)
        worth_at = None if for_goal else place.worth_at
        if worth_at is not None and self._order.position != worth_at[0]:
            place.shared_use = None  # the limit knows the tensor by another position
        self._counters.again.append(formula.nbytes)
        return packed

    def _encoded(
        self, tensor: torch.Tensor, place: Place, codec: Codec, lane: Lane, shared_use: SharedUse
    ) -> WithoutHandle | None:
        in_line, nbytes = lane.executor.in_line, tensor.nbytes
        if in_line is None or lane.overlaps or not self._stands(tensor, place, codec, lane):
            return None
        address = whole_address(tensor)
        encoding = self._encode(tensor, address, codec, in_line) if address else None
        if encoding is None:
            return None
        tolerance = EXACT if codec.lossless else needed_tolerance(codec)
        packed = Encoded(tensor, place.recipe, lane, shared_use, nbytes, tolerance=tolerance)
        packed.codec, packed.encoding, packed.notes = codec, encoding, None
        packed.in_line = in_line
        packed.aligned = address % ALIGNMENT == 0
        loan, used, seconds, _ = encoding
        moves = self._counters.moves
        moves.append((nbytes, 0, *SAVED))  # until it was encoded
        moves.append((-nbytes, loan.known.size, 0, codec.name, nbytes, used, seconds))
        self._state.reclaimer.watch_encoding(packed, loan, in_line.host)
        notes = place.notes
        if notes is not None and notes.learns:
            notes.note_encoded(codec.name, nbytes, used)
            packed.notes = notes
        return packed

    def _stands(self, tensor: torch.Tensor, place: Place, codec: Codec, lane: Lane) -> bool:
        # Whether the choice that was made for the last tensor of the place is that for this one.
        if self._counters.timeline is not None or tensor.is_conj() or tensor.is_neg():
            return False
        site, limit = place.recipe.site, self._limit if lane.may_keep else None
        if place.choice is not None:
            return codec.lossless or self._advisor.milder.allows(site.kind, codec.name)
        if limit is not None and limit.keeps(self._order.position, tensor.nbytes):
            return False
        notes = place.notes
        return isinstance(notes, Advice) and self._advisor.stands(notes, site.kind)

    def _encode(
        self, tensor: torch.Tensor, address: int, codec: Codec, in_line: InLine
    ) -> Encoding | None:
        try:
            if codec.verbatim or (codec.lossless and not address % WORD):
                way = in_line.by_address(codec, tensor.dtype, tensor.nbytes)
                if way is not None:
                    return in_line.encode_at(address, way)
            key = DEFAULT_KEY
            if not codec.lossless:
                key = EncodeKey(in_line.seed, self._order.position, self._order.step)
            return in_line.encode(flat_whole(tensor), codec, key)
        except Exception:  # the whole way meets it again, and counts it
            return None

    def pack_again(self, tensor: torch.Tensor, place: Place) -> Again | None:
        """The packed object of a tensor that another place has saved; None: the whole way.

        Args:
            tensor: as autograd saves it.
            place: where in the step; its last tensor was one that another place had saved.
        """
        start_s = _now()
        shared_use = place.saved_by
        reference = None if shared_use is None else shared_use.last
        first = None if reference is None else reference()
        if shared_use is None or first is None or first.step != self._order.step:
            return None  # the first one has a handle
        tolerance = place.recipe.tolerance
        if first.tolerance > tolerance or not _serves(first, tensor):
            shared_use.seen, place.saved_by = True, None
            return None
        packed = Again(tensor, place.recipe, first, shared_use)
        self._counters.share()
        took_s = _now() - start_s
        first.took_s += took_s
        self._counters.leaving_s += took_s
        return packed

    def _is_worth(self, place: Place, lane: Lane) -> bool:
        if place.worth_at is None or place.formula is None:
            return False
        position, least_price, refused = place.worth_at
        if (
            self._advisor.price(lane.device.kind) < least_price
            or refused != self._recomputer.trials.refused
        ):
            return False
        limit = self._limit if lane.may_keep else None
        return limit is None or (position, place.formula.nbytes) not in limit.staying

    def unpack(self, packed: WithoutHandle, start_s: float) -> torch.Tensor:
        """The tensor, computed again or decoded.

        Args:
            packed: it; asked for, if this is the first time.
            start_s: when this unpack began.

        Raises:
            RuntimeError: autograd's own, if it or an input was modified in place since it was
                saved.
            CorruptEncodingError: an encoding did not come back as it was stored.
        """
        first = packed.first or packed
        self._recomputer.inputs_s = 0.0
        if packed.counter._version != packed.version:  # noqa: SLF001 - without a call
            packed.check()  # which raises
        if not first.uses and not isinstance(first, Away):  # those count for themselves
            self._counters.hits.append(False)
        waited = first.result is not None
        memory = first.waiting() if waited else None  # few do, and each call counts
        if memory is None:
            if type(first) is Recomputed:
                memory = self._recomputer.run(first.remat)
            else:
                memory = self._recomputer.memory(first)
        first.uses += 1
        shared = (first.users > 1 or waited) and _current_backward() != NO_BACKWARD
        if shared and not (isinstance(first, Away) and first.region.source is not None):
            self._results.asked(first, memory)
        took_s = _now() - start_s
        first.took_s += took_s - self._recomputer.inputs_s
        self._counters.leaving_s += took_s
        took = self._state.took
        if took is not None and first.uses == first.users:
            took.append((first.position, first.nbytes, first.took_s))
        return packed.view_of(memory)


def _serves(first: WithoutHandle, tensor: torch.Tensor) -> bool:
    # Whether another saved tensor is this one or a view of its memory, unmodified.
    same = is_saved_again(tensor, first.base, first.dtype)
    return same and tensor._version == first.version  # noqa: SLF001


def _is_at_hand(remat: Remat) -> bool:
    # Whether no input has to be decoded ahead: its user would need a handle.
    for packed in remat.inputs:
        if isinstance(packed, PackedView):
            handle = packed.token.handle
            if handle.state is not State.KEPT and not handle.recomputed:
                return False
    return True
