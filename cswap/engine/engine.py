"""`SwapEngine`: swaps the tensors that autograd saves. One per `install` or `swapping`."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from cswap.advisor.live_costs import UNREAD
from cswap.codecs.base import checked_bound
from cswap.codecs.registry import get_codec
from cswap.devices.base import LinkDevice
from cswap.dynamo import leave_alone
from cswap.engine.link.link import AT_A_TIME
from cswap.engine.packer import Packer
from cswap.engine.replay.replay import Replay
from cswap.engine.saved.packed import Token
from cswap.engine.state import EngineState
from cswap.engine.unpacker import Unpacker
from cswap.stats.stats_file import make_record
from cswap.stats.step_trace import Timeline

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from cswap.advisor.site_history import Explanation
    from cswap.config import SwapConfig
    from cswap.devices.base import Device
    from cswap.engine.order.chooser import Chooser
    from cswap.engine.transfer.handle import Handle
    from cswap.schema.plan import Plan
    from cswap.stats.stats import Stats

IDLE_BYTES: Final = 2 << 20
"""Memory that a pool may keep for reuse after a backward: `optimizer.step` wants it, too."""


class Hooks(Protocol):
    """A pair of autograd's hooks."""

    def pack(self, tensor: torch.Tensor, /) -> Any:
        """Returns the object that autograd is to hold instead of a saved tensor."""
        ...

    def unpack(self, packed: Any, /) -> torch.Tensor:
        """Returns the tensor."""
        ...


class SwapEngine:
    """Packs and unpacks saved tensors; may outlive its hooks.

    Attributes:
        config: the options it was made with.
        scopes: where in the model the current thread is; written by module hooks.
        advisor: chooses codecs.
        counters: counts of everything done so far.
        observer: notes the saved tensors, for the guard.
        owned: storages of the model's parameters and buffers.
        packer: the stage of pack.
        pack: the hook of autograd that takes a saved tensor and returns the object that autograd
            keeps instead. It raises nothing but interrupts.
        unpack: the hook that takes this object and returns the tensor. It raises a RuntimeError,
            autograd's own, if the tensor was modified in place since it was packed, and a
            `CorruptEncodingError` if the stored bytes were damaged.
        sits_out: whether the model's calls that begin from here on run without hooks.
        stand_in: hooks that these calls have in the place of the engine's; None: the engine's.
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
            plan: decisions for the saved tensors.
            device: the only one, for tests.
            unseen: positions of the plan that modules recompute.

        Raises:
            ConfigError: the options do not fit together, or the disk tier cannot be made.
        """
        self._state = state = EngineState(config, plan, device, unseen)
        self.config, self.scopes, self.advisor = config, state.scopes, state.advisor
        self.counters, self.observer, self.owned = state.counters, state.observer, state.owned
        self.packer = Packer(state)
        self._unpacker = Unpacker(state, self._end_backward)
        self._replay = Replay(state, self.packer)
        # Attributes, not methods: a call less for each saved tensor.
        self.pack, self.unpack = self._replay.pack, self._unpacker.unpack
        self.pass_through = Packer.pass_through
        self.sits_out = False
        self.stand_in: Hooks | None = None
        self.at_first_step: Callable[[], bool] | None = None  # until it says that it is done

    # ----------------------------------------------------------------- hooks

    @property
    def wants_operators(self) -> bool:
        """Whether the scopes should say which operator runs: lossy codecs and selectors care."""
        return self.packer.book.by_role

    def begin_step(self) -> None:
        """A forward of the model begins."""
        if self.at_first_step is not None and self.at_first_step():
            self.at_first_step = None
        self._state.tidy()
        self._state.results.clear()  # of a backward that has raised
        if torch.is_grad_enabled():
            self.counters.begin_step()
        goal = self._state.goal
        if goal is not None:
            goal.begin_step()
        self.packer.begin_step()

    def choose_by(self, chooser: Chooser | None) -> None:
        """Let somebody else than the advisor decide from now on; None: the advisor again."""
        self._state.choose_by(chooser)
        self.packer.renumber()  # a goal knows other formulas

    def look(self, *, looks: bool) -> None:
        """Whether the chooser sees the step that begins: Note [steps without a look]."""
        self._state.chooser = self._state.goal if looks else None

    def plan_copies(self, most_bytes: int, *, spares: bool = False) -> None:
        """Let so many bytes be under way over a link, each way.

        Args:
            most_bytes: 0: by the device's own bounds.
            spares: then one tensor at a time: memory counts more than time.
        """
        self._state.lanes.plan_copies(most_bytes, spares=spares)

    def ring_bytes(self, handle: Handle, codec: str) -> int:
        """Bytes of device memory that encodings like this one pass through on their way out.

        Args:
            handle: of a tensor that may go over a link.
            codec: name of the codec.
        """
        owner, source = handle.token(), handle.source
        chosen = get_codec(codec)
        if chosen.verbatim or source is None or not isinstance(owner, Token):
            return 0
        device, itemsize = owner.lane.device, source.element_size()
        most = device.part_bytes if isinstance(device, LinkDevice) else None
        numel = min(handle.raw_nbytes, most or handle.raw_nbytes) // itemsize
        return AT_A_TIME * checked_bound(chosen, source.dtype, numel)

    def renumber(self) -> None:
        """See `Packer.renumber`; between two steps."""
        self.packer.renumber()

    def begin_epoch(self, epochs: int) -> None:
        """The next of ``epochs`` epochs begins; ``policy="cswap+"`` samples values anew."""
        self.advisor.begin_epoch(epochs)

    @property
    def goes_by_slots(self) -> bool:
        """Whether the decisions for places hold in the step that has begun."""
        return self._replay.is_plain

    @property
    def wants_owned(self) -> bool:
        """Whether `own` is to be called before the next step.

        Only new recipes ask for storages, so a step like the last one does without a look at every
        parameter. Where something may be lossy, no parameter may be taken for an activation.
        """
        return self.packer.book.learned or self.advisor.may_use_lossy

    def own(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors outlive the step: leave all tensors in their storages alone."""
        self.packer.book.learned = False
        if self._state.owned.refresh(tensors):
            self.packer.book.forget()

    # ----------------------------------------------------------------- users

    @property
    def stats(self) -> Stats:
        """Statistics of the engine so far."""
        state = self._state
        state.tidy()
        if state.goal is not None:
            state.goal.settle()
        found = self.counters.snapshot()
        if (disk := state.disk) is not None:
            found = replace(found, disk_bytes=disk.in_use_bytes, peak_disk_bytes=disk.peak_bytes)
        return replace(found, exposed_s=found.exposed_s + state.lanes.stalled_s)

    @property
    def scratch_bytes(self) -> int:
        """Encoders' working memory that is kept, in bytes."""
        return self._state.lanes.scratch_bytes

    def explain(self) -> list[Explanation]:
        """Every call site with its profile, the candidates with their cost, and the choice.

        With a goal that has a plan, every tensor of the plan instead, with the ways to hold it, and
        those that backward does not read.
        """
        self._replay.tell()
        decided = self.advisor.explain()
        if (goal := self._state.goal) is not None and (found := goal.explained()):
            return [*found, *(one for one in decided if one.codec == UNREAD)]
        return [self._state.outliving.explained(found) for found in decided]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write statistics and decisions to a JSON file, for ``cswap explain PATH``.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps(make_record(self.stats, self.explain()), indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @contextmanager
    def trace(self, path: str | os.PathLike[str] | None = None) -> Iterator[Timeline]:
        """Record a timeline inside the ``with``; written as a Chrome trace to ``path``, if given.

        Raises:
            OSError: the file cannot be written.
        """
        timeline = Timeline()
        self.counters.timeline = timeline
        self.packer.book.slots = None  # a step may have begun
        try:
            yield timeline
        finally:
            self.synchronize()
            self.counters.count_kept()
            self.counters.timeline = None
            timeline.end()
        if path is not None:
            timeline.save(path)

    def synchronize(self) -> None:
        """Block until every swap-out and swap-in under way is done."""
        self._state.lanes.drain()

    def collect(self) -> None:
        """Give back the memory of graphs that are gone, and memory that was kept for reuse."""
        self._state.tidy()
        self._state.results.clear()
        self.counters.count_kept()
        self._state.lanes.trim(IDLE_BYTES)

    @leave_alone
    def _end_backward(self) -> None:
        self._state.operators.tell()
        if self._state.goal is not None:
            self._state.goal.used()
        self.collect()
        self._state.lanes.backward_ended()

    def rest(self) -> None:
        """No hooks are on for now: keep little memory, and no folder without files."""
        self.collect()
        if self._state.disk is not None:
            self._state.disk.close()

    def close(self) -> None:
        """Nothing more is to be swapped: keep no memory. Graphs made before still work."""
        self.rest()
        self._state.lanes.close()

    def __repr__(self) -> str:
        return f"<SwapEngine: {self.stats.swapped} swapped>"
