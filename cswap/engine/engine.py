"""`SwapEngine`: from a saved tensor to a packed object and back."""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from cswap.advisor.advisor import Advisor
from cswap.advisor.site import Site
from cswap.codecs.layout import flatten
from cswap.codecs.registry import get_codec
from cswap.engine.aliases import AliasTable, make_handle
from cswap.engine.eligibility import OwnedStorages, bytes_of, is_tracing, reason_to_keep
from cswap.engine.follow import PlanFollower
from cswap.engine.guard import Guard
from cswap.engine.handle import Handle, State, Token
from cswap.engine.lanes import Lanes, disk_store, optional_int
from cswap.engine.packed import Kept, PackedView
from cswap.engine.prefetch import StepOrder
from cswap.engine.record import make_record
from cswap.engine.scope import ScopeStack
from cswap.engine.stats import Counters, Stats
from cswap.engine.timeline import Timeline
from cswap.engine.warm import warm
from cswap.engine.watch import Watch
from cswap.engine.window import Window

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from cswap.advisor.memory import Explanation
    from cswap.config import SwapConfig
    from cswap.devices.base import Device
    from cswap.engine.lanes import Lane
    from cswap.schema.plan import Decision, Plan

_log = logging.getLogger("cswap")

PREFETCH_DEPTH = 2
"""Tensors decoded ahead of the one that backward works on."""


class SwapEngine:
    """Swaps what autograd saves. One per `install` or `swapping`; may outlive its hooks.

    Attributes:
        config: the options it was made with.
        scopes: where in the model the current thread is; written by module hooks.
    """

    def __init__(
        self,
        config: SwapConfig,
        plan: Plan | None = None,
        device: Device | None = None,
        unseen: Iterable[int] = (),
    ) -> None:
        """An engine without hooks.

        Args:
            config: checked options.
            plan: what to do with each tensor.
            device: the only one, for tests.
            unseen: positions of the plan that modules recompute.

        Raises:
            ConfigError: the options do not fit together, or the disk tier cannot be made.
        """
        self.config = config
        self.scopes = ScopeStack()
        self._advisor = Advisor(config, plan)
        self._follower = PlanFollower(plan, unseen)
        self._watch = Watch()
        self._counters = Counters()
        self._disk = disk_store(config)
        self._lanes = Lanes(config, self._disk, self._counters, device)
        self._owned = OwnedStorages()
        self._lock = threading.Lock()
        self._aliases = AliasTable()
        self._order = StepOrder()
        self._window = Window(optional_int(config.budget), config.keep_last)
        self._dead: deque[Handle] = deque()
        self._dead_bytes = 0
        self._warned_of_capture = False

    # ----------------------------------------------------------------- hooks

    def pack(self, tensor: torch.Tensor) -> Kept | PackedView:
        """What autograd keeps instead of ``tensor``. Never raises."""
        kind = type(tensor)
        if kind is torch.Tensor:
            if tensor.layout is not torch.strided:  # has no nbytes, or another meaning of it
                return self._keep(tensor, "layout")
            if tensor.nbytes >= self._lanes.min_bytes and tensor.numel():
                return self._pack_large(tensor)
            reason = "small"
        else:
            reason = "parameter" if kind is Parameter else "subclass"
        return self._keep(tensor, reason)

    def unpack(self, packed: Kept | PackedView) -> torch.Tensor:
        """The tensor that was packed.

        Raises:
            RuntimeError: autograd's own, if the tensor was modified in place since it was packed.
            CorruptEncodingError: what came back is not what was stored.
        """
        if isinstance(packed, Kept):
            return packed.unpack()
        return self._unpack_view(packed)

    # ----------------------------------------------------------------- users

    @property
    def stats(self) -> Stats:
        """What has been done so far."""
        self._bury()
        found = self._counters.snapshot(self._disk.in_use_bytes if self._disk else 0)
        return replace(found, exposed_s=found.exposed_s + self._lanes.stalled_s)

    @property
    def scratch_bytes(self) -> int:
        """Encoders' working memory, in bytes: of every engine on the same devices together."""
        return self._lanes.scratch_bytes

    def explain(self) -> list[Explanation]:
        """Every call site with its profile, the candidates with their cost, and the choice."""
        return self._advisor.explain()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write statistics and decisions to a JSON file, for ``cswap explain PATH``.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps(make_record(self.stats, self.explain()), indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @contextmanager
    def trace(self, path: str | os.PathLike[str] | None = None) -> Iterator[Timeline]:
        """Record what happens inside the ``with``; written as a Chrome trace to ``path``, if given.

        Raises:
            OSError: the file cannot be written.
        """
        timeline = Timeline()
        self._counters.timeline = timeline
        try:
            yield timeline
        finally:
            self.synchronize()
            self._counters.timeline = None
        if path is not None:
            timeline.save(path)

    def synchronize(self) -> None:
        """Block until every swap-out under way is done."""
        with self._lock:
            tokens = self._order.live()
        for token in tokens:
            token.handle.lane.executor.settle(token.handle)

    def make_guard(self, model: torch.nn.Module) -> Guard | None:
        """The accuracy guard of a model's steps; None if nothing is lossy, or it is not wanted."""
        if not self._advisor.may_use_lossy or not self.config.guard_every:
            return None
        return Guard(model, self.config, self._counters, self._advisor.milder, self._watch)

    def begin_epoch(self, epochs: int) -> None:
        """The next of ``epochs`` epochs begins; ``policy="cswap+"`` samples values anew."""
        self._advisor.begin_epoch(epochs)

    def begin_step(self) -> None:
        """A forward of the model begins."""
        with self._lock:
            self._order.begin_step()

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors outlive the step: leave them, and what shares their storage, alone."""
        self._owned.refresh(tensors)

    # ------------------------------------------------------------------ pack

    @property
    def wants_operators(self) -> bool:
        """Whether the scopes should say which operator runs: only lossy codecs care."""
        return self._advisor.may_use_lossy

    @staticmethod
    def pass_through(tensor: torch.Tensor) -> Kept:
        """Keep a tensor where it is, uncounted."""
        try:
            version = tensor._version  # noqa: SLF001
            kept = tensor if tensor.is_leaf or is_tracing() else tensor.detach()
        except RuntimeError:  # inference tensors have no version; some subclasses cannot detach
            version, kept = -1, tensor
        return Kept(kept, version)

    def _keep(self, tensor: torch.Tensor, reason: str) -> Kept:
        self._counters.keep(reason, bytes_of(tensor))
        return self.pass_through(tensor)

    def _keep_in_graph(self, tensor: torch.Tensor) -> Kept:
        # A CUDA graph replays kernels at fixed addresses: what it uses cannot go away.
        if not self._warned_of_capture:
            self._warned_of_capture = True
            _log.warning(
                "A CUDA graph is being captured: what autograd saves meanwhile stays on the device."
            )
        return self._keep(tensor, "capturing")

    def _pack_large(self, tensor: torch.Tensor) -> Kept | PackedView:
        if self._dead:
            self._bury()
        scope = self.scopes.current
        reason = scope.keep or reason_to_keep(tensor)
        lane = None if reason else self._lanes.of(tensor.device)
        if lane is None:
            return self._keep(tensor, reason or "device")
        if tensor.nbytes < lane.min_bytes:
            return self._keep(tensor, "small")
        if tensor in self._owned:
            return self._keep(tensor, "parameter")
        if lane.may_capture and lane.device.is_capturing():
            return self._keep_in_graph(tensor)
        site = Site(
            scope=scope.path,
            kind=scope.kind,
            operator=self.scopes.operator,
            producer="" if tensor.grad_fn is None else tensor.grad_fn.name(),
            codec=scope.codec,
        )
        packed = self._pack_handle(tensor, site, lane)
        if self._watch.seen is not None:
            self._watch.note(site.scope, tensor, packed)
        return packed

    def _pack_handle(self, tensor: torch.Tensor, site: Site, lane: Lane) -> Kept | PackedView:
        lossy_ok = self._advisor.may_be_lossy(tensor, site)
        with self._lock:
            handle = self._aliases.find(tensor, lossy_ok=lossy_ok)
            token = None if handle is None or handle.token is None else handle.token()
            if handle is not None and isinstance(token, Token):
                handle.views += 1
                self._counters.share()
                return PackedView(token, tensor)
            position, step = self._order.next_position(), self._order.step
        if position == 0:
            self._follower.begin_step()
            self._advisor.begin_step(self._counters.exposed_s + self._lanes.stalled_s)
        try:
            handle = make_handle(tensor)
        except RuntimeError:  # a storage that is smaller than its tensor says, as FSDP makes them
            return self._keep(tensor, "storage")
        position, decision = self._planned(position, site, handle.raw_nbytes)
        if handle.raw_nbytes < lane.min_bytes:
            return self._keep(tensor, "small")
        handle.section_bytes = None if decision is None else decision.section_bytes
        handle.lane = lane
        handle.position, handle.step, handle.site, handle.lossy_ok = position, step, site, lossy_ok
        handle.views = 1
        return self._admit(handle, tensor, keep=decision is not None and decision.action == "keep")

    def _planned(self, position: int, site: Site, nbytes: int) -> tuple[int, Decision | None]:
        follower, drifted = self._follower, self._follower.drift
        position = follower.find(position, site.scope, nbytes)
        if follower.drift and not drifted:
            self._counters.fall_back("plan", follower.drift)
            self._advisor.forget_plan()
        return position, follower.decision(position)

    def _admit(self, handle: Handle, tensor: torch.Tensor, *, keep: bool) -> PackedView:
        token = Token(handle)
        handle.token = weakref.ref(token, partial(self._on_death, handle))
        self._counters.admit(handle.raw_nbytes)
        with self._lock:
            self._aliases.add(handle, tensor)
            self._order.add(handle, token)
        packed = PackedView(token, tensor)
        if keep:  # a handle all the same: what is saved again later must be found again
            self._counters.stay("plan", handle.raw_nbytes)
        elif self._window.open:
            self._hold_in_window(handle, token)
        else:
            self._swap_out(handle)
        return packed

    def _hold_in_window(self, handle: Handle, token: Token) -> None:
        self._counters.stay("budget", handle.raw_nbytes)
        with self._lock:
            leaving = self._window.add(token, handle.raw_nbytes)
        for oldest in leaving:
            self._counters.stay("budget", oldest.handle.raw_nbytes, -1)
            self._swap_out(oldest.handle)

    def _swap_out(self, handle: Handle) -> None:
        if handle.state is not State.KEPT or handle.source is None or handle.site is None:
            return
        if handle.modified():
            self._counters.stay("modified", handle.raw_nbytes)  # unpack has to raise
            return
        x = flatten(handle.source) if handle.gathered else handle.source
        try:
            handle.advice = self._advisor.choose(
                x,
                handle.site,
                handle.position,
                lossy_ok=handle.lossy_ok,
                may_keep=handle.lane.may_keep,
            )
            codec = handle.advice.codec
        except Exception as error:
            self._counters.fall_back("advisor", error)
            codec = get_codec("raw")
        if codec is None:
            handle.lossy_ok = False
            self._counters.stay("does_not_pay", handle.raw_nbytes)
            return
        handle.lossy_ok = not codec.lossless
        compile_s = warm(codec, x.dtype, x.device)
        if compile_s:
            self._counters.compiled(compile_s)
        handle.lane.executor.swap_out(handle, x, codec)

    # ---------------------------------------------------------------- unpack

    def _unpack_view(self, packed: PackedView) -> torch.Tensor:
        packed.check()
        handle = packed.token.handle
        self._prefetch_after(handle)
        memory, own = handle.lane.executor.memory(handle)
        out = packed.rebuild(memory, own=own)
        with self._lock:
            handle.unpacked += 1
            last = handle.unpacked % max(handle.views, 1) == 0
            if last:
                handle.lane.ready.remove(handle)
        if last:
            handle.lane.executor.drop_result(handle)
        elif not own:
            self._note_ready(handle)
        return out

    def _prefetch_after(self, handle: Handle) -> None:
        with self._lock:
            if handle.unpacked == 0:
                self._order.asked(handle)
            if not handle.lane.overlaps:
                return
            depth = self._follower.depth or PREFETCH_DEPTH
            ahead = self._order.upcoming(handle, depth)  # tokens: no other thread buries these
        for n, other in enumerate((token.handle for token in ahead), 1):
            if not self._follower.may_start(other.position, n):
                continue
            if other.lane.has_room(other.raw_nbytes) and other.lane.executor.prefetch(other):
                self._note_ready(other)

    def _note_ready(self, handle: Handle) -> None:
        with self._lock:
            dropped = handle.lane.ready.add(handle)
        for other in dropped:
            other.lane.executor.drop_result(other)

    # --------------------------------------------------------------- release

    def _on_death(self, handle: Handle, _reference: weakref.ref[Token]) -> None:
        # Runs wherever the last packed view died, maybe under our own locks: only take a note.
        self._dead.append(handle)
        self._dead_bytes += handle.raw_nbytes
        if self._dead_bytes > handle.lane.device.backlog_bytes:
            self._dead_bytes = 0
            handle.lane.device.defer(self._bury)

    def _bury(self) -> None:
        while self._dead:
            try:
                handle = self._dead.popleft()
            except IndexError:  # another thread took it
                return
            with self._lock:
                self._aliases.discard(handle)
                self._order.discard(handle)
                handle.lane.ready.remove(handle)
            handle.lane.executor.release(handle)
            handle.token = None

    def __repr__(self) -> str:
        return f"<SwapEngine: {self.stats.swapped} swapped>"
