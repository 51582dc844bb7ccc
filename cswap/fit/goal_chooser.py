"""The chooser of a goal: it sees each step, and tells the engine how to hold each tensor.

Note [everything is swapped]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
While a step is explored, each tensor is held in the way that takes the fewest bytes. So a goal that
can be reached is nearly held from the first step on, and every way is measured where it is used.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from cswap.advisor.candidates import RAW
from cswap.advisor.live_costs import KEEP, REMAT
from cswap.advisor.rates import HOOKS_S
from cswap.codecs.registry import get_codec
from cswap.codecs.tolerance import needed_tolerance
from cswap.engine.order.chooser import Choice
from cswap.engine.saved.packed import Kept, PackedView
from cswap.engine.saved.unread import Unread
from cswap.engine.transfer.handle import State
from cswap.fit.explained import explained
from cswap.fit.problem import DWELL
from cswap.fit.saved import Key, Need, Saved, Way
from cswap.fit.seen import Lap, SeenFormula, SeenTensor, Step, WayNotes
from cswap.fit.way_times import WayTimes
from cswap.pool import size_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import TypeAlias

    from cswap.advisor.cost import Candidate
    from cswap.advisor.site_history import Explanation
    from cswap.devices.stopwatch import Stopwatch
    from cswap.engine.engine import SwapEngine
    from cswap.engine.transfer.handle import Handle
    from cswap.fit.link_rates import LinkRates
    from cswap.fit.saved import Decided
    from cswap.fit.used_bytes import UsedBytes

    Entered: TypeAlias = tuple[int, int, Any]  # a `Lap` without its end

FIRST_LOOKS: Final = {"cpu": 4, "cuda": 2}
"""Steps of a new plan that are all looked at, by kind of device: corrections follow soon, or never.
A GPU's peaks are known without a look. Of a CPU's two, both may be forwards without a backward, and
so may be each eighth step after them."""

LOOK_EVERY: Final = 8
"""Later, every so many steps are looked at; so many in a row after a step that was another one than
the step before. In as many, tensors that are too small to swap are counted: most never change. At
least so many lie between two explorations because of drift: shapes may change in every step."""

MOST_BETWEEN: Final = 256
"""The same on a GPU, where a look takes its host twice as long as the step. There, the first ones
come after 8, 16 and 32 steps."""

HOST_S: Final = 1e-4
"""Seconds that the host of a GPU takes for a tensor that leaves and comes back, or is computed
again by one operator: assumed, of 26 to 40 calls (tests/devices/test_link_slots.py)."""

MORE_S: Final = 5e-5
"""For each operator more: assumed."""

PRODUCT: Final = 3
"""Operators as many as a matrix product or a convolution counts besides: casts, views, checks."""

LEAST_RATIO: Final = 1.02
"""A codec that takes off less is no way to hold a tensor, where host memory is device memory."""


NO_FORMULA: Final = SeenFormula()
"""Of a tensor that cannot be computed again."""


class _Ways(NamedTuple):
    """The ways to hold a tensor of so many bytes, by action.

    Attributes:
        nbytes: of the tensor.
        ways: see above.
        complete: whether the advisor has offered codecs: a sample of a GPU's tensor comes late.
    """

    nbytes: int
    ways: dict[str, Way]
    complete: bool = True


def _kept(nbytes: int) -> dict[str, Way]:
    return {KEEP: Way(KEEP, nbytes, 0.0)}


class GoalChooser:
    """Tells an engine how to hold each tensor, and sees the result.

    Attributes:
        step: the one that runs.
        exploring: whether each tensor is held in its smallest way.
        stored: meanwhile, first saves of tensors that are not computed again.
        decided: else, how to hold each tensor; others are held in their smallest way.
        link: the device's; None: host memory is device memory.
        several_forwards: whether a step has several forwards: then no place in it has one choice.
        times: that tensors took in the steps without a look.
        first_looks: see `FIRST_LOOKS`.
    """

    def __init__(
        self,
        on_step: Callable[[], None],
        used: UsedBytes,
        engine: SwapEngine,
        watch: Stopwatch,
        link: LinkRates | None,
        lap_bytes: Callable[[], int],
    ) -> None:
        """See the steps from the next one on.

        Args:
            on_step: called where a forward begins.
            used: counts the tensors that autograd uses.
            engine: asks; knows which module runs, what the model owns, and which lossy codecs the
                guard has forbidden.
            watch: of the device.
            link: see above.
            lap_bytes: most bytes of a GPU since it was called last.
        """
        self.begin_step, self.settle = on_step, used.settle
        self._used, self._scopes = used, engine.scopes
        self._counters, self._lap_bytes = engine.counters, lap_bytes
        self._look, self._ring_bytes = engine.look, engine.ring_bytes
        self._owned, self._milder = engine.owned, engine.advisor.milder
        self._by_address: dict[int, SeenTensor] = {}
        used.on_gone = self._note_gone
        self._using: dict[int, SeenTensor] = {}
        self._leaving: dict[int, SeenTensor] = {}
        self._watch, self.link, self.unified = watch, link, link is None
        self._hooks_s = HOOKS_S["cpu" if self.unified else "cuda"]
        self.exploring = True
        self.stored: frozenset[Key] = frozenset()
        self.decided: Mapping[Key, Decided] = {}
        self.several_forwards = False
        self.step = Step(explored=True, watch=watch, began=watch.mark())
        self._thread = threading.get_ident()
        self._count: Counter[tuple[str, torch.dtype]] = Counter()
        self._ways: dict[Key, _Ways] = {}
        self._formulas: dict[Key, SeenFormula] = {}
        self._notes: dict[tuple[Key, str], WayNotes] = {}
        self._small: set[int] = set()
        self._decided: Handle | None = None
        self._kept: Key | None = None  # of the save under way, if it stays by the plan
        self.first_looks = FIRST_LOOKS["cpu" if self.unified else "cuda"]
        self._n_steps, self._looks_until = 0, self.first_looks
        self._counts_small = True
        self.times = WayTimes()
        self.took = self.times.took

    @property
    def is_on(self) -> bool:
        """Whether the step that begins can be seen: not while a CUDA graph is captured."""
        return self._watch.is_on()

    def skip(self) -> None:
        """A step begins that cannot be seen."""
        self.step = Step(explored=self.exploring, looked=False, watch=self._watch)
        self._look(looks=False)

    def end_step(self) -> None:
        """Another forward begins, in this thread: the step may have come to its end."""
        if not self.unified:
            self.step.ended = self._watch.mark()

    def look(self) -> None:
        """A new step begins, in this thread: look at it, if a look is due."""
        n, before = self._n_steps, self.step
        if before.changed:
            self._looks_until = n + LOOK_EVERY
        looks = self._is_due()
        watch = self._watch
        self.step = Step(explored=self.exploring, looked=looks, watch=watch, began=watch.mark())
        if not before.explored and not before.changed:
            self.times.settle(before, self.decided)
        self._look(looks=looks)
        self._counts_small = self.exploring or n % LOOK_EVERY == 0
        if not self._counts_small:
            self.step.small_bytes = before.small_bytes
        self._n_steps = n + 1
        self._thread = threading.get_ident()
        self._kept = None
        self._count.clear()
        self._by_address.clear()
        self._small.clear()

    def _is_due(self) -> bool:
        # A second forward in backward saves tensors that have no place in the step.
        if self.exploring or self.several_forwards:
            return True
        n = self._n_steps
        often = LOOK_EVERY
        if not self.unified and n > LOOK_EVERY:
            often = min(MOST_BETWEEN, 1 << (n.bit_length() - 1))
        return n < self._looks_until or n % often == 0

    def obey(self, decided: Mapping[Key, Decided]) -> None:
        """Hold tensors in these ways from the next step on."""
        self.exploring = False
        self.decided = decided
        self.times.expect_others()
        self._n_steps, self._looks_until = 0, self.first_looks
        self.several_forwards = False

    def explore(self) -> None:
        """Hold tensors in their smallest ways from the next step on, and ask anew for the ways."""
        self.exploring = True
        self.stored = frozenset()
        self._ways.clear()
        self._formulas.clear()
        self._notes.clear()
        self.times.forget()

    def saved(self, step: Step) -> list[Saved]:
        """The tensors of an explored step that backward used, with their ways as measured.

        Those that it did not use, as of an output that is not in the loss, are held to its end.
        """
        firsts = {one.names[0]: one for one in step.seen.values()}
        end, found = step.n_moments - 1, []
        for one in step.seen.values() if step.n_uses else ():
            name = one.names[0]
            formula, known = self._formulas.get(name, NO_FORMULA), self._ways[name]
            first, last = one.first_use or end, one.last_use or end
            gone = one.gone - 1 if one.gone > last else last + DWELL
            saved = Saved(
                tuple(one.names),
                known.nbytes,
                self._measured(name),
                one.born,
                first,
                gone,
                tuple(self._needs(formula, firsts)),
                min(max(one.left - 1, one.born), max(first - 1, one.born)),
                formula.depth,
                formula.product,
                one.part_of,
            )
            found.append(saved.of_size(one.nbytes))
        return found

    @staticmethod
    def _needs(formula: SeenFormula, firsts: Mapping[Key, SeenTensor]) -> Iterator[Need]:
        for first, depth in formula.inputs:
            one = firsts.get(first)
            yield from (Need(name, depth) for name in ([first] if one is None else one.names))

    def explained(self) -> list[Explanation]:
        """See `Chooser`."""
        if self.exploring:
            return []
        ways = self._ways
        return explained(
            self.decided,
            lambda key: self._measured(key) if key in ways else (),
            self._notes,
            self.link,
        )

    # ------------------------------------------------------------ by the engine

    def keeps(self, tensor: torch.Tensor, scope: str) -> bool:
        """See `Chooser`."""
        if self.exploring or threading.get_ident() != self._thread:
            return False
        name = self._name(tensor, scope)
        decided = self.decided.get(name)
        keeps = decided is not None and decided.allows(tensor.nbytes) and decided.action == KEEP
        if keeps:
            self._kept = name
        return keeps

    def choose(
        self,
        tensor: torch.Tensor,
        handle: Handle,
        again_s: Callable[[], float | None],
        candidates: Callable[[], tuple[Candidate, ...]],
    ) -> Choice | None:
        """See `Chooser`."""
        if threading.get_ident() != self._thread or handle.site is None:
            self.step.stranger = True
            return None
        self._decided = handle
        key = self._name(tensor, handle.site.scope)
        self._see(handle, key)
        action = None if self.exploring else self._planned(key, handle, again_s)
        if action is None:
            again = again_s()
            if again is not None and self.exploring:
                self._note_formula(key, handle)
            ways = self._ways_now(key, handle, candidates)
            if again is not None and REMAT not in ways:
                ways[REMAT] = self._way(REMAT, again, more=_more_operators(handle))
            action = self._smallest(key, handle, again=again is not None)
        if action in (KEEP, REMAT):
            return Choice(action)
        notes = self._notes.setdefault((key, action), WayNotes(action))
        return Choice(action, notes)

    def enter(self) -> Entered:
        """See `Chooser`."""
        self.settle()
        step, other_bytes = self.step, 0
        if step.explored and not self.unified:
            other_bytes = self._lap_bytes() - self._counters.device_bytes
        return step.n_moments, other_bytes, self._watch.mark()

    def _leave(self, entered: Entered, *, is_use: bool = False, stays: bool = False) -> Any:
        # Returns the mark.
        step, mark = self.step, self._watch.mark()
        step.laps.append(Lap(*entered, mark, is_use, stays))
        if step.explored and not self.unified:
            self._lap_bytes()
        return mark

    def packed(
        self, tensor: torch.Tensor, packed: Kept | PackedView | Unread, entered: Entered
    ) -> None:
        """See `Chooser`."""
        step = self.step
        if threading.get_ident() != self._thread:
            return
        self._leave(entered, stays=not isinstance(packed, PackedView))
        step.last = weakref.ref(packed)
        if isinstance(packed, Kept):
            kept, self._kept = self._kept, None
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
            if plain and (kept is not None or self._counts_small):
                with suppress(RuntimeError):  # it stands for another one, inside of vmap or jvp
                    self._note_kept(tensor, kept)
            return
        name = self._name(tensor, self._scopes.current.path)
        self._count[name.scope, name.dtype] += 1
        storage = tensor.untyped_storage()
        if isinstance(packed, Unread):  # before it was known for that, it had a name
            first = self._by_address.get(storage.data_ptr())
            if first is not None:
                first.names.append(name)
            if self.unified and tensor not in self._owned:  # forward may hold it for longer
                self._used.add(storage)
            return
        handle = packed.token.handle
        one = step.seen.get((handle.step, handle.position))
        if one is None:
            # The engine has decided itself: it is a leaf that is saved again, for example.
            one = self._see(handle, name)
            nbytes = handle.raw_nbytes
            stays = _Ways(nbytes, _kept(nbytes), complete=False)
            if handle.pinned:  # since the step before, in which it has left
                self._ways[name] = stays
            self._ways.setdefault(name, stays)
        elif handle is not self._decided:
            one.names.append(name)
        self._decided = None
        self._by_address[storage.data_ptr()] = one
        if self.unified and handle.state is State.STORED:  # forward may hold it for longer
            self._leaving[self._used.add(storage)] = one

    def missed(self) -> None:
        """See `Chooser`."""
        self.step.changed = True

    def used(self, made: torch.Tensor | None = None) -> None:
        """See `Chooser`."""
        self.step.n_uses += 1
        if made is not None and self.unified and threading.get_ident() == self._thread:
            self._used.add(made.untyped_storage())
        if self.unified:
            self.step.ended = self._watch.mark()

    def unpacked(self, packed: PackedView, tensor: torch.Tensor, entered: Entered) -> None:
        """See `Chooser`."""
        step, handle = self.step, packed.token.handle
        # On a GPU, backward runs in a thread of autograd's.
        if self.unified and threading.get_ident() != self._thread:
            step.stranger = True
        left = self._leave(entered, is_use=True)
        if self.unified:
            step.ended = left
        step.n_uses += 1
        one = step.seen.get((handle.step, handle.position))
        if one is not None:
            one.first_use = one.first_use or step.n_moments
            one.last_use = step.n_moments
        if self.unified and handle.state is State.STORED:  # autograd's from here on
            name = self._used.add(tensor.untyped_storage())
            if one is not None:
                self._using[name] = one
        step.n_moments += 1

    def _note_gone(self, name: int) -> None:
        one = self._using.pop(name, None)
        if one is not None:
            one.gone = self.step.n_moments
        one = self._leaving.pop(name, None)
        if one is not None:
            one.left = self.step.n_moments

    # ---------------------------------------------------------------- decisions

    def _planned(self, key: Key, handle: Handle, again_s: Callable[[], float | None]) -> str | None:
        # None: the smallest way.
        decided, nbytes = self.decided.get(key), handle.raw_nbytes
        if (
            decided is None
            or not self._may(decided.action, handle)
            or (decided.action == REMAT and again_s() is None)
        ):
            self.step.unknown_bytes += nbytes
            return None
        if decided.allows(nbytes):
            return decided.action
        self.step.grown[decided.number] = nbytes
        # A codec and an operator take off bytes whatever the size; what stays is more than planned.
        return None if decided.action == KEEP else decided.action

    def _may(self, action: str, handle: Handle) -> bool:
        # Whether this tensor's tolerance allows a way, and the guard does.
        if action in (KEEP, REMAT) or (codec := get_codec(action)).lossless:
            return True
        site = handle.site
        tolerated = needed_tolerance(codec) <= handle.tolerance
        return tolerated and site is not None and self._milder.allows(site.kind, action)

    def _ways_now(
        self, key: Key, handle: Handle, candidates: Callable[[], tuple[Candidate, ...]]
    ) -> dict[str, Way]:
        # While a step is explored, those of another size than the last one are found anew.
        known, nbytes = self._ways.get(key), handle.raw_nbytes
        if known is None or not known.complete or (self.exploring and known.nbytes != nbytes):
            offered = candidates()
            found = self._ways_of(handle, offered)
            known = self._ways[key] = _Ways(nbytes, found, complete=bool(offered))
            for action in found:
                self._notes.pop((key, action), None)
        return known.ways

    def _ways_of(self, handle: Handle, candidates: tuple[Candidate, ...]) -> dict[str, Way]:
        found = _kept(handle.raw_nbytes)
        for one in candidates:
            if one.codec == KEEP:
                continue
            if not self.unified:
                # Copies take nothing of the computation.
                device_s = 0.0 if one.codec == RAW else max(0.0, one.device_s - self._hooks_s)
                way = self._way(one.codec, device_s, int(one.nbytes))
                found[one.codec] = way._replace(passing_bytes=self._ring_bytes(handle, one.codec))
            elif one.ratio >= LEAST_RATIO:  # raw bytes that move there gain nothing
                found[one.codec] = Way(one.codec, size_class(int(one.nbytes)), one.device_s)
        if not self.unified and not candidates and not handle.is_cast:  # no sample yet: see `_Ways`
            found[RAW] = self._way(RAW, 0.0, handle.raw_nbytes)
        return found

    def _smallest(self, key: Key, handle: Handle, *, again: bool) -> str:
        # again: whether this tensor can be computed again.
        again = again and not (self.exploring and key in self.stored)
        ways = [
            way
            for way in self._measured(key)
            if self._may(way.action, handle) and (again or way.action != REMAT)
        ]
        return min(ways, key=lambda w: (w.held_bytes, w.alone_s(self.link))).action

    def _measured(self, key: Key) -> tuple[Way, ...]:
        return tuple(self._corrected(key, way) for way in self._ways[key].ways.values())

    def _corrected(self, key: Key, way: Way) -> Way:
        notes = self._notes.get((key, way.action))
        if notes is None or not notes.nbytes:
            return way
        if not self.unified:
            return way._replace(link_bytes=notes.nbytes)
        held_bytes = size_class(notes.nbytes)  # the store's buffers have fixed sizes
        if notes.device_s > 0:
            return Way(way.action, held_bytes, notes.device_s + self._hooks_s, in_step=True)
        return Way(way.action, held_bytes, way.added_s)

    def _way(self, action: str, device_s: float, link_bytes: int = 0, more: int = 0) -> Way:
        # That holds no bytes of the device. A CPU's own time is the step's; a GPU's host is ahead.
        if self.unified:
            return Way(action, 0, device_s + self._hooks_s)
        return Way(action, 0, device_s, link_bytes=link_bytes, host_s=HOST_S + more * MORE_S)

    def _name(self, tensor: torch.Tensor, scope: str) -> Key:
        # Of the save that is under way.
        dtype = tensor.dtype
        return Key(scope, dtype, self._count[scope, dtype])

    def _see(self, handle: Handle, name: Key) -> SeenTensor:
        step = self.step
        part_of = 0 if handle.whole else handle.storage_key
        one = SeenTensor([name], handle.raw_nbytes, step.n_moments, part_of=part_of)
        step.seen[handle.step, handle.position] = one
        step.n_moments += 1
        return one

    def _note_kept(self, tensor: torch.Tensor, name: Key | None) -> None:
        step = self.step
        if name is None:
            step.small_bytes += self._bytes_once(tensor)
            return
        decided = self.decided.get(name)
        self._count[name.scope, name.dtype] += 1
        if decided is not None:
            step.kept[decided.number] = tensor.untyped_storage().nbytes()
        if self.unified and tensor not in self._owned:  # a buffer can look like another tensor
            self._used.add(tensor.untyped_storage())

    def _note_formula(self, key: Key, handle: Handle) -> None:
        owner = handle.token()
        remat = None if owner is None else owner.remat
        if remat is None:
            return
        inputs: list[tuple[Key, int]] = []
        for packed, distance in zip(remat.inputs, remat.distances, strict=True):
            if isinstance(packed, PackedView):
                other = packed.token.handle
                below = self.step.seen.get((other.step, other.position))
                inputs += [] if below is None else [(below.names[0], distance)]
        product = remat.formula.product
        self._formulas[key] = SeenFormula(tuple(inputs), remat.own_depth, product)

    def _bytes_once(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._small or tensor in self._owned:
            return 0
        self._small.add(address)
        return storage.nbytes()


def _more_operators(handle: Handle) -> int:
    # That compute a tensor again, beyond the first: without those of its inputs.
    owner = handle.token()
    remat = None if owner is None else owner.remat
    if remat is None:
        return 0
    return remat.formula.operator.count(">") + PRODUCT * remat.formula.product
