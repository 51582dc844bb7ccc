"""Swap-out: from a tensor's own memory to the store. See Note [who holds what, until when]."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch

from cswap.codecs.base import checked_bound, checked_size
from cswap.codecs.layout import copy_bytes
from cswap.codecs.registry import get_codec
from cswap.engine.handle import State
from cswap.engine.part import cut, encode_key
from cswap.engine.tiers import checksum

if TYPE_CHECKING:
    from cswap.codecs.base import Codec, LateSize, Stream
    from cswap.devices.base import Event, Role
    from cswap.engine.handle import Handle
    from cswap.engine.part import Part
    from cswap.engine.tiers import Tiers

MAX_LEAVING: Final = 256
"""Tensors on their way out that are remembered, to be waited for when staging memory is full."""

INDICES: Final = frozenset({torch.int16, torch.int32, torch.int64})
"""An operator that is given a wrong index reads memory that is not its own, without a check."""


@dataclass(slots=True)
class _Output:
    """What an encode job leaves behind: its scratch memory, and how much of it is in use."""

    scratch: torch.Tensor | None = None
    size: int | LateSize = 0
    bound: int = 0


class SwapOut:
    """Encodes and stores, part by part; each step's callback submits the next."""

    def __init__(self, tiers: Tiers, seed: int) -> None:
        """Args: tiers: shared with swap-in; seed: of stochastic rounding."""
        self._tiers = tiers
        self._seed = seed
        self._waiting_bytes = 0
        self._leaving: deque[Handle] = deque(maxlen=MAX_LEAVING)

    def start(self, handle: Handle, x: torch.Tensor, codec: Codec) -> None:
        """See `Executor.swap_out`."""
        device = self._tiers.device
        section_bytes = None if device.unified else handle.section_bytes or device.section_bytes
        parts = cut(x, codec, section_bytes)
        for part in parts:
            part.checked = self._what_to_check(x.dtype, codec)
        try:
            with self._tiers.lock:
                handle.parts, handle.unsafe, handle.unstored = parts, len(parts), len(parts)
                handle.must_round_trip = (
                    not codec.lossless and torch.are_deterministic_algorithms_enabled()
                )
                handle.to(State.ENCODING)
                self._waiting_bytes += handle.raw_nbytes
                backlog = self._waiting_bytes > device.backlog_bytes
            self._submit(handle, x, codec, in_line=backlog and device.unified)
        except BaseException:
            self._take_back(handle)
            raise

    def _what_to_check(self, dtype: torch.dtype, codec: Codec) -> Literal["", "source", "payload"]:
        # Indices always, where the host's memory is at hand: the checksum of an encoding is cheap.
        if self._tiers.verify:
            return "source" if codec.lossless else "payload"
        return "payload" if self._tiers.device.unified and dtype in INDICES else ""

    def _submit(self, handle: Handle, x: torch.Tensor, codec: Codec, *, in_line: bool) -> None:
        step = self._send if codec.verbatim else self._encode
        if not self._tiers.device.unified:
            self._make_room()
            self._leaving.append(handle)
        start = time.perf_counter()
        for part in handle.parts:
            step(handle, part, part.of(x), "compute" if in_line else "codec")
        if in_line:
            self._tiers.counters.exposed(time.perf_counter() - start)

    def _take_back(self, handle: Handle) -> None:
        # See Note [interrupts]. Jobs that were submitted see that nobody wants them.
        with self._tiers.lock:
            if handle.state is State.ENCODING:
                handle.to(State.KEPT)
                self.waits_no_more(handle)

    def waits_no_more(self, handle: Handle) -> None:
        """Under the lock: the handle's source no longer waits for an encode."""
        self._waiting_bytes -= handle.raw_nbytes

    def recount(self, handles: list[Handle]) -> None:
        """Under the lock: these are all handles; add up the bytes that wait."""
        waiting = (h.raw_nbytes for h in handles if h.state is State.ENCODING)
        self._waiting_bytes = sum(waiting)

    def _make_room(self) -> None:
        # The link is slower than the computation: wait for it here rather than run out of memory.
        start = time.perf_counter()
        while self._leaving and self._tiers.device.staging_full():
            self._tiers.settle(self._leaving.popleft())
            self._tiers.counters.exposed(time.perf_counter() - start)
            start = time.perf_counter()

    def _wanted(self, handle: Handle, part: Part) -> bool:
        # Whether the handle is still on its way out, and the part is one of this attempt's.
        return handle.state is State.ENCODING and handle.parts[part.index] is part and handle.alive

    def _send(self, handle: Handle, part: Part, x: torch.Tensor, role: Role = "codec") -> None:
        # Nothing to encode: straight from the tensor's own memory to the host's.
        host = self._tiers.host.take(x.nbytes)
        if host is None:  # the way to the disk is that of all encodings
            self._encode(handle, part, x, role)
            return

        def copy(_stream: Stream) -> None:
            if self._wanted(handle, part):
                copy_bytes(host, x, x.nbytes)
                if part.checked:
                    part.checksum = checksum(x)

        device = self._tiers.device
        role = role if device.unified else "d2h"
        event = device.submit(copy, role=role, after=(device.now(),))
        self._under_way(handle, part, event)

        def sent() -> None:
            fine = event.error is None and not handle.modified()
            part.encode_s = event.elapsed_s
            self._tiers.draw("copy out", role, handle, part, event, x.nbytes)
            if fine and self._store(handle, part, host, x.nbytes):
                self._stored(handle, part, None, event)
                return
            self._tiers.host.give_back(host)
            self._failed(handle, part, x, event.error)

        device.when(event, sent)

    def _encode(self, handle: Handle, part: Part, x: torch.Tensor, role: Role = "codec") -> None:
        out, codec = _Output(), part.codec
        key = encode_key(self._seed, handle, part)

        def job(stream: Stream) -> None:
            if not self._wanted(handle, part):  # asked for, or released, meanwhile
                return
            out.bound = checked_bound(codec, x.dtype, x.numel())
            # Taken here and not at submit: encodes that wait their turn hold no scratch.
            out.scratch = self._tiers.device.scratch(out.bound)
            out.size = codec.encode_flat(x, out.scratch, key=key, stream=stream)
            if part.checked == "source":
                part.checksum = checksum(x)

        event = self._tiers.device.submit(job, role=role, after=(self._tiers.device.now(),))
        self._under_way(handle, part, event)

        def encoded() -> None:
            error = event.error
            if out.scratch is not None:
                self._tiers.draw("encode", role, handle, part, event, x.nbytes)
            if error is None and out.scratch is not None and not handle.modified():
                part.encode_s = event.elapsed_s
                try:
                    nbytes = checked_size(codec, out.size, out.bound)
                except Exception as wrong:  # the codec's own fault, as if it had raised
                    error = wrong.with_traceback(None)
                else:
                    self._encoded(handle, part, out.scratch, nbytes, event)
                    return
            self._tiers.give_back(out.scratch)
            self._failed(handle, part, x, error)

        self._tiers.device.when(event, encoded)

    def _under_way(self, handle: Handle, part: Part, event: Event) -> None:
        # Callbacks may have gone further already, with a later event.
        with self._tiers.lock:
            if handle.state is State.ENCODING and handle.parts[part.index] is part:
                handle.event = event

    def _failed(
        self, handle: Handle, part: Part, x: torch.Tensor, error: BaseException | None
    ) -> None:
        # Nothing of this part is stored.
        if not self._wanted(handle, part):
            return
        if error is not None:
            self._degrade(handle, part, x, error)
        else:
            self._keep(handle, "modified", None)

    def _encoded(
        self, handle: Handle, part: Part, scratch: torch.Tensor, nbytes: int, event: Event
    ) -> None:
        host = self._tiers.host.take(nbytes)
        if host is None:
            self._spill(handle, part, scratch, nbytes, event)
            return

        def copy(_stream: Stream | None) -> None:
            copy_bytes(host, scratch, nbytes)
            if part.checked == "payload":
                part.checksum = checksum(scratch[:nbytes])

        if self._tiers.device.unified:  # no link: a job of its own would cost more than the copy
            copy(None)  # before the source is let go: the copy may be interrupted
            if self._store(handle, part, host, nbytes):
                self._stored(handle, part, scratch, event)
                return
        elif self._store(handle, part, host, nbytes):
            copied = self._tiers.device.submit(copy, role="d2h", after=(event,))
            with self._tiers.lock:
                handle.event = copied
            self._tiers.device.when(copied, lambda: self._stored(handle, part, scratch, copied))
            return
        self._tiers.host.give_back(host)
        self._tiers.device.give_back(scratch)

    def _store(self, handle: Handle, part: Part, host: torch.Tensor, nbytes: int) -> bool:
        # The source of this part has been read for the last time; whether it still matters.
        with self._tiers.lock:
            if not self._wanted(handle, part):
                return False
            part.host, part.nbytes = host, nbytes
            part.stored = self._tiers.device.unified
            self._safe(handle, host.numel())
            return True

    def _safe(self, handle: Handle, host_bytes: int) -> None:
        # Under the lock. The one place where a swapped tensor's own memory is given up; a part of
        # it is in so much of the host's now.
        freed = 0
        if handle.unsafe == 1:
            freed = handle.raw_nbytes
            # All is in place where there is no link: an interrupt may end this statement, not half.
            handle.to(State.STORED if self._in_one(handle) else State.IN_FLIGHT)
            handle.let_go()
            self._waiting_bytes -= freed
        handle.unsafe -= 1
        self._tiers.counters.hold(device=-freed, host=host_bytes)

    def _in_one(self, handle: Handle) -> bool:
        return len(handle.parts) == 1 and handle.parts[0].stored

    def _stored(
        self, handle: Handle, part: Part, scratch: torch.Tensor | None, copied: Event
    ) -> None:
        self._tiers.give_back(scratch)
        if scratch is not None and not self._tiers.device.unified:
            self._tiers.draw("copy out", "d2h", handle, part, copied, part.nbytes)
        whole = False
        with self._tiers.lock:
            part.stored = True
            current = handle.parts[part.index] is part
            lost = not current or handle.state in (State.KEPT, State.RELEASED)
            if not lost:
                handle.error = handle.error or copied.error
                handle.unstored -= 1
                whole = handle.unstored == 0
                if whole and handle.state is State.IN_FLIGHT:
                    handle.to(State.STORED)
        if lost:
            self._tiers.free_part(part)
            return
        raw_nbytes = handle.raw_nbytes
        if len(handle.parts) > 1:
            raw_nbytes = raw_nbytes * part.numel // sum(p.numel for p in handle.parts)
        self._tiers.counters.encoded(
            part.codec.name, raw_nbytes, part.nbytes, part.encode_s, whole=whole
        )
        if whole and handle.advice is not None and handle.advice.learns:
            nbytes = sum(p.nbytes for p in handle.parts)
            handle.advice.note_encoded(part.codec.name, handle.raw_nbytes, nbytes)

    def _spill(
        self, handle: Handle, part: Part, scratch: torch.Tensor, nbytes: int, event: Event
    ) -> None:
        # The host tier is full. The source is held until the file is written: a disk may be, too.
        if self._tiers.disk is None:
            self._tiers.device.give_back(scratch)
            self._keep(handle, "host_limit", "no spill_dir")
            return
        disk = self._tiers.disk

        def write(_stream: Stream) -> None:
            payload = scratch[:nbytes].cpu()
            if part.checked == "payload":
                part.checksum = checksum(payload)
            part.file = disk.write(payload)

        written = self._tiers.device.submit(write, role="d2h", after=(event,))
        with self._tiers.lock:
            if self._wanted(handle, part):
                handle.event = written
        self._tiers.device.when(
            written, lambda: self._spilled(handle, part, scratch, nbytes, written)
        )

    def _spilled(
        self, handle: Handle, part: Part, scratch: torch.Tensor, nbytes: int, written: Event
    ) -> None:
        if part.file is None:
            self._tiers.device.give_back(scratch)
            if self._wanted(handle, part):
                self._keep(handle, "disk", written.error or "spill_limit reached")
            return
        with self._tiers.lock:
            part.nbytes = nbytes
            part.stored = self._tiers.device.unified
            if self._wanted(handle, part):
                self._safe(handle, 0)
        self._stored(handle, part, scratch, written)

    def _degrade(self, handle: Handle, part: Part, x: torch.Tensor, error: BaseException) -> None:
        raw = get_codec("raw")
        if part.codec is raw or isinstance(error, MemoryError):  # raw would want as much
            self._keep(handle, "memory" if isinstance(error, MemoryError) else "raw:encode", error)
            return
        self._tiers.counters.fall_back(f"{part.codec.name}:encode", error)
        part.codec = raw
        self._encode(handle, part, x)

    def _keep(self, handle: Handle, reason: str, why: object) -> None:
        # The source is still there; so the tensor stays on the device after all.
        if why is not None:
            self._tiers.counters.fall_back(reason, why)
        with self._tiers.lock:
            if handle.state is State.ENCODING:
                handle.to(State.KEPT)
                self.waits_no_more(handle)
                self._tiers.counters.stay(reason, handle.raw_nbytes)
        self._tiers.free(handle)
