"""`SwapEngine`: from a saved tensor to a packed object and back."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from cswap.advisor.advisor import Advisor
from cswap.advisor.call_site import Site
from cswap.codecs.layout import flatten
from cswap.codecs.registry import get_codec
from cswap.codecs.warmup import warm
from cswap.engine.aliases import AliasTable, is_result, make_token
from cswap.engine.eligibility import OwnedStorages, bytes_of, is_tracing, reason_to_keep
from cswap.engine.follow import PlanFollower
from cswap.engine.handle import Handle, State, Token
from cswap.engine.lanes import Lanes, disk_store, optional_int
from cswap.engine.observer import Observer
from cswap.engine.packed import Kept, PackedView
from cswap.engine.prefetch import StepOrder
from cswap.engine.reclaim import Reclaimer
from cswap.engine.scope import ScopeStack
from cswap.engine.window import Window
from cswap.log import log
from cswap.stats.counters import Counters
from cswap.stats.stats_file import make_record
from cswap.stats.step_trace import Timeline

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from cswap.advisor.site_history import Explanation
    from cswap.config import SwapConfig
    from cswap.devices.base import Device
    from cswap.engine.lanes import Lane
    from cswap.schema.plan import Decision, Plan
    from cswap.stats.stats import Stats

PREFETCH_DEPTH = 2
"""Tensors decoded ahead of the one that backward works on."""

IDLE_BYTES = 2 << 20
"""Memory that a pool may keep for reuse after a backward: `optimizer.step` wants it, too."""

NO_BACKWARD = -1
"""torch's number of the backward that runs, while none does."""


class SwapEngine:
    """Swaps what autograd saves. One per `install` or `swapping`; may outlive its hooks.

    Attributes:
        config: the options it was made with.
        scopes: where in the model the current thread is; written by module hooks.
        advisor: chooses codecs.
        counters: what has been done so far.
        observer: notes what is saved, for the guard.
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
        self.advisor = Advisor(config, plan)
        self._follower = PlanFollower(plan, unseen)
        self.observer = Observer()
        self.counters = Counters()
        self._disk = disk_store(config, self.counters)
        self._lanes = Lanes(config, self._disk, self.counters, device)
        self._owned = OwnedStorages()
        self._lock = threading.Lock()
        self._aliases = AliasTable()
        self._order = StepOrder()
        self._window = Window(optional_int(config.budget), config.keep_last)
        self._reclaimer = Reclaimer(self._release)
        self._saved_again: set[tuple[int, int]] = set()
        self._backward = NO_BACKWARD
        self._interrupted = False
        self._warned_of_capture = False

    # ----------------------------------------------------------------- hooks

    def pack(self, tensor: torch.Tensor) -> Kept | PackedView:
        """What autograd keeps instead of ``tensor``. Raises nothing but interrupts."""
        try:
            return self._pack(tensor)
        except BaseException:
            self._interrupted = True
            raise

    def unpack(self, packed: Kept | PackedView) -> torch.Tensor:
        """The tensor that was packed.

        Raises:
            RuntimeError: autograd's own, if the tensor was modified in place since it was packed.
            CorruptEncodingError: what came back is not what was stored.
        """
        if isinstance(packed, Kept):
            return packed.unpack()
        try:
            return self._unpack_view(packed)
        except Exception:
            raise
        except BaseException:
            self._interrupted = True
            raise

    # ----------------------------------------------------------------- users

    @property
    def stats(self) -> Stats:
        """What has been done so far."""
        self._tidy()
        found = self.counters.snapshot(self._disk.in_use_bytes if self._disk else 0)
        lost = self._lanes.lost_jobs
        if lost:
            reasons = {**found.fallbacks_by_reason, "worker": lost}
            found = replace(found, fallbacks=found.fallbacks + lost, fallbacks_by_reason=reasons)
        return replace(found, exposed_s=found.exposed_s + self._lanes.stalled_s)

    @property
    def scratch_bytes(self) -> int:
        """Encoders' working memory, in bytes: of every engine on the same devices together."""
        return self._lanes.scratch_bytes

    def explain(self) -> list[Explanation]:
        """Every call site with its profile, the candidates with their cost, and the choice."""
        return self.advisor.explain()

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
        self.counters.timeline = timeline
        try:
            yield timeline
        finally:
            self.synchronize()
            self.counters.timeline = None
        if path is not None:
            timeline.save(path)

    def synchronize(self) -> None:
        """Block until every swap-out and swap-in under way is done."""
        self._lanes.drain()

    def collect(self) -> None:
        """Give back the memory of graphs that are gone, and memory that was kept for reuse."""
        self._tidy()
        self._lanes.trim(IDLE_BYTES)

    def rest(self) -> None:
        """No hooks are on for now: keep little memory, and no folder without files."""
        self.collect()
        if self._disk is not None:
            self._disk.close()

    def close(self) -> None:
        """Nothing more is to be swapped: keep no memory. Graphs made before still work."""
        self.rest()
        self._lanes.close()

    def begin_epoch(self, epochs: int) -> None:
        """The next of ``epochs`` epochs begins; ``policy="cswap+"`` samples values anew."""
        self.advisor.begin_epoch(epochs)

    def begin_step(self) -> None:
        """A forward of the model begins."""
        self._tidy()
        with self._lock:
            self._order.begin_step()

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors outlive the step: leave them, and what shares their storage, alone."""
        self._owned.refresh(tensors)

    # ------------------------------------------------------------------ pack

    @property
    def wants_operators(self) -> bool:
        """Whether the scopes should say which operator runs: only lossy codecs care."""
        return self.advisor.may_use_lossy

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
        self.counters.keep(reason, bytes_of(tensor))
        return self.pass_through(tensor)

    def _keep_in_graph(self, tensor: torch.Tensor) -> Kept:
        # A CUDA graph replays kernels at fixed addresses: what it uses cannot go away.
        if not self._warned_of_capture:
            self._warned_of_capture = True
            log.warning(
                "A CUDA graph is being captured: what autograd saves meanwhile stays on the device."
            )
        return self._keep(tensor, "capturing")

    def _pack(self, tensor: torch.Tensor) -> Kept | PackedView:
        if torch._C._is_tracing():  # noqa: SLF001 - each look at a tensor would be recorded
            return self._keep(tensor, "tracing")
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

    def _pack_large(self, tensor: torch.Tensor) -> Kept | PackedView:
        if self._reclaimer.waiting or self._interrupted:
            self._tidy()
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
        if self.observer.seen is not None:
            self.observer.note(site.scope, tensor, packed)
        return packed

    def _pack_handle(self, tensor: torch.Tensor, site: Site, lane: Lane) -> Kept | PackedView:
        lossy_ok = self.advisor.may_be_lossy(tensor, site)
        with self._lock:
            token = self._aliases.find(tensor, lossy_ok=lossy_ok)
            again = token is not None and not is_result(tensor)
            if token is None:
                position, step = self._order.next_position(), self._order.step
        if again and token is not None:
            token = self._pin(token, tensor)
        if token is not None:
            with self._lock:
                token.handle.views += 1
            self.counters.share()
            return PackedView(token, tensor)
        if position == 0:
            self._follower.begin_step()
            self.advisor.begin_step(self.counters.exposed_s + self._lanes.stalled_s)
        try:
            token = make_token(tensor)
        except RuntimeError:  # a storage that is smaller than its tensor says, as FSDP makes them
            return self._keep(tensor, "storage")
        handle = token.handle
        position, decision = self._planned(position, site, handle.raw_nbytes)
        if handle.raw_nbytes < lane.min_bytes:
            return self._keep(tensor, "small")
        handle.section_bytes = None if decision is None else decision.section_bytes
        handle.lane = lane
        handle.position, handle.step, handle.site, handle.lossy_ok = position, step, site, lossy_ok
        if (position, handle.raw_nbytes) in self._saved_again:
            handle.pinned = True
        kept = decision is not None and decision.action == "keep"
        return self._admit(token, tensor, keep="plan" if kept else None)

    def _pin(self, token: Token, tensor: torch.Tensor) -> Token:
        # A leaf is saved again: see Note [when two saved tensors are one].
        handle = token.handle
        self._saved_again.add((handle.position, handle.raw_nbytes))
        handle.pinned = True
        handle.lane.executor.stop(handle)
        if handle.state is State.KEPT and not handle.must_round_trip:
            return token
        mine = make_token(tensor)
        mine.handle.lane, mine.handle.pinned = handle.lane, True
        mine.handle.site, mine.handle.step = handle.site, handle.step
        self._reclaimer.watch(mine)
        self.counters.admit(mine.handle.raw_nbytes)
        self.counters.stay("saved_again", mine.handle.raw_nbytes)
        with self._lock:
            self._aliases.add(mine.handle, tensor)
        return mine

    def _planned(self, position: int, site: Site, nbytes: int) -> tuple[int, Decision | None]:
        follower, drifted = self._follower, self._follower.drift
        position = follower.find(position, site.scope, nbytes)
        if follower.drift and not drifted:
            self.counters.fall_back("plan", follower.drift)
            self.advisor.forget_plan()
        return position, follower.decision(position)

    def _admit(self, token: Token, tensor: torch.Tensor, *, keep: str | None) -> PackedView:
        handle = token.handle
        handle.views = 1
        self._reclaimer.watch(token)
        self.counters.admit(handle.raw_nbytes)
        with self._lock:
            self._aliases.add(handle, tensor)
            self._order.add(handle, token)
        packed = PackedView(token, tensor)
        if keep:  # a handle all the same: if it is saved again later it must be found again
            self.counters.stay(keep, handle.raw_nbytes)
        elif self._window.open:
            self._hold_in_window(handle, token)
        else:
            self._swap_out(handle)
        return packed

    def _hold_in_window(self, handle: Handle, token: Token) -> None:
        self.counters.stay("budget", handle.raw_nbytes)
        with self._lock:
            leaving = self._window.add(token, handle.raw_nbytes)
        for oldest in leaving:
            self.counters.stay("budget", oldest.handle.raw_nbytes, -1)
            self._swap_out(oldest.handle)

    def _swap_out(self, handle: Handle) -> None:
        source = handle.source
        if handle.state is not State.KEPT or source is None or handle.site is None:
            return
        if handle.pinned:
            self.counters.stay("saved_again", handle.raw_nbytes)
            return
        if handle.modified():
            self.counters.stay("modified", handle.raw_nbytes)  # unpack has to raise
            return
        x = flatten(source) if handle.gathered else source
        try:
            handle.advice = self.advisor.choose(
                x,
                handle.site,
                handle.position,
                lossy_ok=handle.lossy_ok,
                may_keep=handle.lane.may_keep,
            )
            codec = handle.advice.codec
        except Exception as error:
            self.counters.fall_back("advisor", error)
            codec = get_codec("raw")
        if codec is None:
            handle.lossy_ok = False
            self.counters.stay("does_not_pay", handle.raw_nbytes)
            return
        handle.lossy_ok = not codec.lossless
        compile_s = warm(codec, x.dtype, x.device)
        if compile_s:
            self.counters.compiled(compile_s)
        handle.lane.executor.swap_out(handle, x, codec)

    # ---------------------------------------------------------------- unpack

    def _unpack_view(self, packed: PackedView) -> torch.Tensor:
        if self._reclaimer.waiting or self._interrupted:
            self._tidy()
        packed.check()
        handle = packed.token.handle
        self._note_backward()
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

    def _note_backward(self) -> None:
        # Once per backward: when it ends, all that its graph held is gone.
        backward: int = torch._C._current_graph_task_id()  # noqa: SLF001
        if backward not in (NO_BACKWARD, self._backward):
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.collect)  # noqa: SLF001

    def _release(self, handle: Handle) -> None:
        with self._lock:
            self._aliases.discard(handle)
            self._order.discard(handle)
            handle.lane.ready.remove(handle)
        handle.lane.executor.release(handle)

    def _tidy(self) -> None:
        # Release the dead. After an interrupt somewhere in our code, sums may be off by one tensor.
        try:
            self._reclaimer.collect()
            if self._interrupted:
                self._add_up_again()
                self._interrupted = False
        except BaseException:
            self._interrupted = True
            raise

    def _add_up_again(self) -> None:
        with self._reclaimer.paused():
            self._lanes.drain()
            with self._lock:
                handles = list(self._aliases)
                self._window.recount()
            self._lanes.recount(handles)
            self.counters.recount(
                device=sum(h.device_bytes for h in handles), host=sum(h.host_bytes for h in handles)
            )

    def __repr__(self) -> str:
        return f"<SwapEngine: {self.stats.swapped} swapped>"
