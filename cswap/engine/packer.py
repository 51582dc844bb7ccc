"""From a saved tensor to a packed object: the stage of pack.

A tensor's way is: recipe of its call site, handle, send. Everything that takes long (choosing a
codec, sampling values, compiling) happens where a recipe or an advice is made.
"""

from __future__ import annotations

import time
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from cswap.advisor.call_site import Site
from cswap.codecs.tolerance import COARSE, EXACT
from cswap.engine.link.passage import Passage
from cswap.engine.order.chooser import STAYS
from cswap.engine.order.step_order import NO_BACKWARD
from cswap.engine.recipe import Recipe, is_as_new, producer
from cswap.engine.recipes import Place, RecipeBook
from cswap.engine.replay.slot_maker import SlotMaker
from cswap.engine.saved.aliases import make_token
from cswap.engine.saved.apart import take_apart
from cswap.engine.saved.eligibility import (
    bytes_of,
    derives_from_parameter,
    is_cast_of_parameter,
    is_tracing,
    is_wrapped,
    plain_parts,
    reason_to_keep,
)
from cswap.engine.saved.operators import EXCLUDED, LEFT_OUT
from cswap.engine.saved.packed import Kept, KeptClone, KeptParameter, PackedView
from cswap.engine.sender import Sender
from cswap.engine.sharing import Sharing
from cswap.engine.transfer.handle import nothing_of
from cswap.log import log
from cswap.remat.reads import CLONE

if TYPE_CHECKING:
    from cswap.engine.order.plan_follower import Planned
    from cswap.engine.saved.apart import Apart
    from cswap.engine.saved.module_stack import Scope
    from cswap.engine.saved.outer import Outer
    from cswap.engine.saved.packed import Token
    from cswap.engine.saved.unread import Unread
    from cswap.engine.state import EngineState

_now = time.perf_counter
_Tensor = torch.Tensor
_current_backward = torch._C._current_graph_task_id  # noqa: SLF001
_is_tracing = torch._C._is_tracing  # noqa: SLF001
_len_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_strided = torch.strided


def kept_in_place(tensor: torch.Tensor, kind: type[Kept] = Kept) -> Kept:
    """`Packer.pass_through` for a strided tensor of no special class, with fewer calls."""
    if _len_dispatch_modes():  # one of them may record operators
        return Packer.pass_through(tensor, kind)
    try:
        return kind(tensor if tensor.is_leaf else tensor.detach(), tensor._version)  # noqa: SLF001
    except RuntimeError:
        return Packer.pass_through(tensor, kind)


def kind_of_kept(tensor: torch.Tensor) -> type[Kept]:
    """The class of the object that keeps a tensor which might have left."""
    return KeptClone if type(tensor.grad_fn).__name__ == CLONE else Kept


class Packer:
    """Packs the tensors of one engine.

    Attributes:
        book: its recipes.
    """

    def __init__(self, state: EngineState) -> None:
        """Args: state: the engine's."""
        self._state = state
        self._scopes, self._counters, self._lock = state.scopes, state.counters, state.lock
        self._aliases, self._order, self._newest = state.aliases, state.order, state.newest
        self._deaths = state.reclaimer.deaths
        self._min_bytes = max(1, state.lanes.min_bytes)
        self._parameters, self._small = state.counters.parameters, state.counters.small
        self.book = RecipeBook(by_role=state.advisor.may_use_lossy or bool(state.operators))
        self._sharing = Sharing(state)
        self._outliving = state.outliving.known
        self._recomputer, self._leaves = state.recomputer, state.recomputer.leaves
        self._sender = Sender(state)
        self._remat = self._sender.remat
        self._slots = SlotMaker(state)
        self._follower = state.follower
        self._unread = state.unread
        self._staying: set[tuple[int, int]] = set()  # addresses and bytes, by a goal's plan
        self._warned_of_capture = self._has_drifted = False

    def pack(
        self, tensor: torch.Tensor, outer: Outer | None = None
    ) -> Kept | PackedView | Unread | Apart:
        """See `SwapEngine.pack`. Args: outer: of which the tensor is a part."""
        # Most tensors stay: parameters and small ones take a way with few calls.
        chooser, kind = self._state.chooser, type(tensor)
        try:
            if kind is not _Tensor and kind is not Parameter:
                apart = take_apart(tensor, self.pack, self._min_bytes)
                if apart is not None:
                    return apart
            entered = None if chooser is None else chooser.enter()
            packed: Kept | PackedView | Unread
            if (kind is not _Tensor and kind is not Parameter) or _is_tracing():
                packed = self._keep_special(tensor)
            elif tensor.layout is not _strided:  # has no nbytes, or another meaning of it
                packed = self._keep(tensor, "parameter" if kind is Parameter else "layout")
            else:
                nbytes = tensor.nbytes
                owner = tensor if kind is Parameter else tensor._base  # noqa: SLF001
                # isinstance runs Python code for plain tensors.
                if owner is not None and (
                    (kind := type(owner)) is Parameter
                    or (kind is not _Tensor and isinstance(owner, Parameter))
                ):
                    self._parameters.append(nbytes)
                    packed = kept_in_place(tensor, KeptParameter)
                elif nbytes < self._min_bytes:
                    self._small.append(nbytes)
                    packed = kept_in_place(tensor)
                elif tensor.is_nested:  # strided, and without sizes
                    packed = self._keep(tensor, "layout")
                else:
                    packed = self._take(tensor, nbytes, outer)
            if chooser is not None:
                chooser.packed(tensor, packed, entered)
        except BaseException:
            self._state.interrupted = True
            raise
        return packed

    def _take(
        self, tensor: torch.Tensor, nbytes: int, outer: Outer | None
    ) -> Kept | PackedView | Unread:
        # A strided tensor of no special class, which is large enough to leave.
        state, order = self._state, self._order
        if self._deaths or state.interrupted:
            state.tidy(in_step=True)
        if order.asked_since_pack and _current_backward() == NO_BACKWARD:
            self._counters.begin_step()
            self.begin_step()  # which no call of a model has announced
        place = self.book.next_place()
        scopes, chooser = self._scopes, state.chooser
        scope = scopes.stack[-1]
        operator = scopes.operator
        if place is None or not self.book.is_of(place, tensor, scope, operator):
            if state.goal is not None and (chooser is None or place is not None):
                state.goal.missed()
            place = self._place(tensor, scope, operator)
        if place.recipe.keep is not None:
            self._counters.keep(place.recipe.keep, nbytes)
            return kept_in_place(tensor, kind_of_kept(tensor))
        if place.unread is not None and (unread := self._unread.take(tensor, place)) is not None:
            if place.unread == "numbered":
                with self._lock:
                    position, _ = order.next_position()
                    self._newest.skips(order.call, position)
                if not position:
                    self._state.step_begins()
            return unread
        if chooser is not None:
            place.choice = place.shared_use = place.saved_by = place.stay = None
            if chooser.keeps(tensor, scope.path):
                place.choice, place.slot, place.way = STAYS, None, None
                self._count_by_goal(tensor, nbytes)
                return kept_in_place(tensor, kind_of_kept(tensor))
        return self._take_general_way(tensor, place, scope, outer)

    def _count_by_goal(self, tensor: torch.Tensor, nbytes: int) -> None:
        # In a step that the goal looks at: the others have the same tensors twice.
        self._counters.by_goal.append(nbytes)
        try:
            memory = tensor.data_ptr(), nbytes
        except RuntimeError:  # it stands for another one, inside of vmap or jvp
            return
        if memory not in self._staying:
            self._staying.add(memory)
            self._counters.by_goal_once.append(nbytes)

    def _take_general_way(
        self, tensor: torch.Tensor, place: Place, scope: Scope, outer: Outer | None
    ) -> Kept | PackedView:
        start_s = _now()
        packed = self._pack(tensor, place, outer)
        if not isinstance(packed, Kept):
            packed.token.took_s += _now() - start_s
            if self._unread.seeks:
                packed.place = place
        observer = self._state.observer
        if observer.seen is not None:
            observer.note(scope.path, tensor, packed)
        return packed

    def begin_step(self) -> None:
        """A step begins, in this thread."""
        if self._has_drifted:  # places know what the plan said
            self._has_drifted = False
            self.renumber()
        self.book.begin_step()
        if self._unread.unproven:
            self._unread.begin_step()
        if self._leaves.known:
            self._leaves.begin_step()
        self._staying.clear()
        self._state.backward_is_next = True
        with self._lock:
            order, ended, n_saved = self._order, self._order.call, self._order.position
            order.begin_step()
            if self._newest.open and n_saved:
                self._newest.begin_call(ended, n_saved, order.call)

    @staticmethod
    def pass_through(tensor: torch.Tensor, kind: type[Kept] = Kept) -> Kept:
        """Keep a tensor where it is, uncounted. Args: kind: of the object that keeps it."""
        try:
            version = tensor._version  # noqa: SLF001
            kept = tensor if tensor.is_leaf or is_tracing() else tensor.detach()
        except RuntimeError:  # inference tensors have no version; some subclasses cannot detach
            version, kept = -1, tensor
        return kind(kept, version)

    def _keep(self, tensor: torch.Tensor, reason: str) -> Kept:
        self._counters.keep(reason, bytes_of(tensor))
        return self.pass_through(tensor)

    def _keep_special(self, tensor: torch.Tensor) -> Kept:
        if _is_tracing():  # each look at a tensor would be recorded
            return self._keep(tensor, "tracing")
        for part in plain_parts(tensor):  # it holds them: an encoding would come on top
            if is_wrapped(part):
                continue
            with self._lock:
                token = self._aliases.find(part, part.untyped_storage(), tolerance=COARSE)
            if token is not None:
                self._sharing.pin(token)
        try:
            is_owned = isinstance(tensor, Parameter) or derives_from_parameter(tensor)
        except Exception:  # a subclass may raise anything, pack may not
            is_owned = False
        if not is_owned:
            self._counters.count_subclass(type(tensor).__name__)
        return self._keep(tensor, "parameter" if is_owned else "subclass")

    # ----------------------------------------------------------------- recipes

    def _place(self, tensor: torch.Tensor, scope: Scope, operator: str) -> Place:
        recipe = self.book.known(tensor, scope, operator)
        if recipe is None or recipe.keep == "parameter":
            # Which tensors are parameters is asked anew: they look like others of their size.
            recipe = self._make_recipe(tensor, scope, operator)
            place = self.book.learn(recipe, tensor, operator)
        else:
            place = self.book.place(recipe, tensor.nbytes)
        if self._unread.known:
            self._unread.begin_place(place)
        return place

    def _make_recipe(self, tensor: torch.Tensor, scope: Scope, operator: str) -> Recipe:
        state = self._state
        role = self.book.role(tensor, operator)
        codec, stays = state.operators.of(role, scope)
        site = Site(scope.path, scope.kind, operator, producer(tensor), codec)
        recipe = Recipe(
            scope, tensor.dtype, tensor.shape, tensor.stride(), tensor.device,
            is_as_new(tensor), role, site=site, stays=stays,
        )  # fmt: skip
        recipe.keep = scope.keep or reason_to_keep(tensor)
        if recipe.keep == "parameter" and self._remat and is_cast_of_parameter(tensor):
            recipe.keep, recipe.is_cast = None, True  # it may be computed again
        if recipe.keep is not None:
            return recipe
        recipe.lane = state.lanes.of(tensor.device)
        if recipe.lane is None:
            recipe.keep = "device"
        elif tensor.nbytes < recipe.lane.min_bytes:
            recipe.keep = "small"
        elif tensor in state.owned:
            recipe.keep = "parameter"
        else:
            recipe.tolerance = state.advisor.tolerance_of(tensor, site)
            recipe.nothing = nothing_of(recipe.dtype, recipe.device)
        return recipe

    # ----------------------------------------------------------------- handles

    def _pack(self, tensor: torch.Tensor, place: Place, outer: Outer | None) -> Kept | PackedView:
        recipe = place.recipe
        lane, tolerance = recipe.lane, recipe.tolerance if outer is None else EXACT
        assert lane is not None  # or it would stay
        if lane.may_capture and lane.device.is_capturing():
            return self._keep_in_graph(tensor)
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # it stands for another one, inside of vmap or jvp
            return self._keep(tensor, "wrapped")
        with self._lock:
            found = self._aliases.find(tensor, storage, tolerance=tolerance, outer=outer)
            if found is None:
                position, step = self._order.next_position()
        if found is not None:
            return self._share(found, tensor, place, outer)
        place.saved_by = place.shared_use = None
        if position == 0:
            self._state.step_begins()
        try:
            token = make_token(tensor, lane, storage)
        except RuntimeError:  # a storage that is smaller than its tensor says, as FSDP makes them
            return self._keep(tensor, "storage")
        handle = token.handle
        if self._follower.follows:
            handle.planned = self._planned(position, recipe.site, handle.raw_nbytes)
        if handle.raw_nbytes < lane.min_bytes:
            return self._keep(tensor, "small")
        handle.position, handle.step, handle.site = position, step, recipe.site
        handle.place = get_ident(), self._order.call, place.number
        handle.tolerance, handle.outer = tolerance, outer
        handle.is_cast = recipe.is_cast and is_cast_of_parameter(tensor)
        packed = PackedView(token, tensor)
        self._send(token, tensor, place)
        if lane.step_bytes is not None:
            lane.hold_step()
        return packed

    def _share(
        self, first: Token, tensor: torch.Tensor, place: Place, outer: Outer | None
    ) -> PackedView:
        # A tensor in the memory of one that was saved before.
        stays = place.recipe.stays
        decided = self._state.goal is not None or self._follower.follows
        if first.handle.pinned == LEFT_OUT and not stays and not decided:
            its_place = self.book.place_at(first.handle.place[2])
            if its_place is not None:
                its_place.stay = None
            self._sender.leave_after_all(first)
        place.stay = None if first.stay is None else replace(first.stay, shares=True)
        place.shared_use = place.choice = place.way = None
        if stays == EXCLUDED:
            place.saved_by = place.slot = None
            return self._sharing.keep(first, tensor)
        place.saved_by = self._sharing.use_of(first, tensor, outer)
        self._slots.learn_shared(first, tensor, place)
        return self._sharing.pack(first, tensor, outer)

    def _send(self, token: Token, tensor: torch.Tensor, place: Place) -> None:
        handle, storage = token.handle, tensor.untyped_storage()
        action = None if handle.planned is None else handle.planned.decision.action
        key = handle.position, handle.raw_nbytes
        by_selector = place.recipe.stays
        reason = "outlives" if key in self._outliving else self._sharing.saved_again.get(key)
        handle.pinned = by_selector if by_selector == EXCLUDED else reason or by_selector
        obeys = self._state.chooser is not None or place.choice is not None
        if self._remat and action is None and not obeys:
            token.remat = self._recomputer.find(tensor, handle, place)
        self._state.watch(token)
        self._counters.admit(handle.raw_nbytes)
        if action == "keep":
            self._sender.keep(token, place)
        elif action == "recompute":
            self._sender.recompute(token, tensor, place)
        elif action == "swap" or not obeys or not self._sender.obey(token, tensor, place):
            self._sender.send(token, place)
        with self._lock:  # from here on, it may serve other tensors, and other threads
            self._aliases.add(handle, storage)
        if not isinstance(token.stored, Passage):
            place.way = None
        if handle.outer is not None:  # no slot compares its version
            token.shared_use = place.shared_use = place.stay = None
        self._slots.learn(token, tensor, place)

    def _keep_in_graph(self, tensor: torch.Tensor) -> Kept:
        # A CUDA graph replays kernels at fixed addresses: the tensors that it uses cannot go away.
        if not self._warned_of_capture:
            self._warned_of_capture = True
            log.warning(
                "A CUDA graph is being captured: tensors that autograd saves meanwhile stay on "
                "the device."
            )
        return self._keep(tensor, "capturing")

    def _planned(self, position: int, site: Site, nbytes: int) -> Planned | None:
        follower = self._follower
        planned = follower.find(position, site.scope, nbytes)
        if follower.drift:
            self._counters.fall_back("plan", follower.drift)
            self._state.advisor.forget_sites()
            self._has_drifted = True
        return planned

    def renumber(self) -> None:
        """Forget facts about positions: the next steps save other tensors, or another number.

        Modules begin or end to be recomputed.
        """
        self._sharing.saved_again.clear()
        self._outliving.clear()
        self.book.forget()
