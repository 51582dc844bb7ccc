"""Swap-out: from a tensor's own memory to the store. See Note [who holds what, until when]."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cswap.codecs.base import EncodeKey
from cswap.codecs.layout import copy_bytes
from cswap.codecs.registry import get_codec
from cswap.engine.handle import State
from cswap.engine.tiers import checksum

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec, LateSize, Stream
    from cswap.devices.base import Event, Role
    from cswap.engine.handle import Handle
    from cswap.engine.tiers import Tiers


MAX_LEAVING = 256
"""Tensors on their way out that are remembered, to be waited for when staging memory is full."""


@dataclass(slots=True)
class _Output:
    """What an encode job leaves behind: its scratch memory, and how much of it is in use."""

    scratch: torch.Tensor | None = None
    size: int | LateSize = 0


class SwapOut:
    """Encodes and stores; each step's callback submits the next."""

    def __init__(self, tiers: Tiers, seed: int) -> None:
        """Args: tiers: shared with swap-in; seed: of stochastic rounding."""
        self._tiers = tiers
        self._seed = seed
        self._waiting_bytes = 0
        self._leaving: deque[Handle] = deque(maxlen=MAX_LEAVING)

    def start(self, handle: Handle, x: torch.Tensor, codec: Codec) -> None:
        """See `Executor.swap_out`."""
        device = self._tiers.device
        with self._tiers.lock:
            handle.to(State.ENCODING)
            self._waiting_bytes += handle.raw_nbytes
            backlog = self._waiting_bytes > device.backlog_bytes
        if not device.unified:
            self._make_room()
            self._leaving.append(handle)
        if codec.verbatim and not device.unified:
            self._send(handle, x, codec)
        elif backlog and device.unified:
            start = time.perf_counter()
            self._encode(handle, x, codec, "compute")
            self._tiers.counters.exposed(time.perf_counter() - start)
        else:
            self._encode(handle, x, codec, "codec")

    def waits_no_more(self, handle: Handle) -> None:
        """Under the lock: the handle's source no longer waits for an encode."""
        self._waiting_bytes -= handle.raw_nbytes

    def _make_room(self) -> None:
        # The link is slower than the computation: wait for it here rather than run out of memory.
        start = time.perf_counter()
        while self._leaving and self._tiers.device.staging_full():
            self._tiers.settle(self._leaving.popleft())
            self._tiers.counters.exposed(time.perf_counter() - start)
            start = time.perf_counter()

    def _send(self, handle: Handle, x: torch.Tensor, codec: Codec) -> None:
        # Nothing to encode: straight from the tensor's own memory to the host's.
        host = self._tiers.host.take(handle.raw_nbytes)
        if host is None:  # the way to the disk is that of all encodings
            self._encode(handle, x, codec, "codec")
            return

        def copy(_stream: Stream) -> None:
            if handle.state is State.ENCODING:
                copy_bytes(host, x, handle.raw_nbytes)
                if self._tiers.verify:
                    handle.checksum = checksum(x)

        device = self._tiers.device
        event = device.submit(copy, role="d2h", after=(device.now(),))
        with self._tiers.lock:
            if handle.state is State.ENCODING:
                handle.event = event
        device.when(event, lambda: self._sent(handle, x, codec, host, event))

    def _sent(
        self, handle: Handle, x: torch.Tensor, codec: Codec, host: torch.Tensor, event: Event
    ) -> None:
        modified, stored = handle.modified(), False
        with self._tiers.lock:
            if handle.state is State.ENCODING and event.error is None and not modified:
                handle.to(State.IN_FLIGHT)
                handle.codec, handle.host, handle.nbytes = codec, host, handle.raw_nbytes
                self._let_go(handle, host.numel())
                stored = True
        if stored:
            self._stored(handle, None, event)
            return
        self._tiers.host.give_back(host)
        if handle.state is not State.ENCODING:
            self._abandon(handle, None)
        elif event.error is not None:
            self._degrade(handle, x, codec, event.error)
        else:
            self._keep(handle, "modified", None)

    def _encode(self, handle: Handle, x: torch.Tensor, codec: Codec, role: Role) -> None:
        out = _Output()
        key = EncodeKey(self._seed, handle.position, handle.step)

        def job(stream: Stream) -> None:
            if handle.state is not State.ENCODING:  # wanted back, or released, meanwhile
                return
            # Taken here and not at submit: encodes that wait their turn hold no scratch.
            out.scratch = self._tiers.device.scratch(codec.bound(x.dtype, x.numel()))
            out.size = codec.encode_flat(x, out.scratch, key=key, stream=stream)
            if self._tiers.verify and codec.lossless:
                handle.checksum = checksum(x)

        event = self._tiers.device.submit(job, role=role, after=(self._tiers.device.now(),))
        with self._tiers.lock:
            if handle.state is State.ENCODING and handle.event is None:
                handle.event = event

        def encoded() -> None:
            if event.error is not None and handle.state is State.ENCODING:
                self._tiers.give_back(out.scratch)
                self._degrade(handle, x, codec, event.error)
            elif handle.state is not State.ENCODING or out.scratch is None:
                self._abandon(handle, out.scratch)
            else:
                self._tiers.counters.spent(codec.name, encode_s=event.elapsed_s)
                self._encoded(handle, codec, out.scratch, out.size, event)

        self._tiers.device.when(event, encoded)

    def _encoded(
        self,
        handle: Handle,
        codec: Codec,
        scratch: torch.Tensor,
        size: int | LateSize,
        event: Event,
    ) -> None:
        if handle.modified():
            self._tiers.device.give_back(scratch)
            self._keep(handle, "modified", None)
            return
        nbytes = size if isinstance(size, int) else size.value()
        host = self._tiers.host.take(nbytes)
        if host is None:
            self._spill(handle, codec, scratch, nbytes, event)
            return
        with self._tiers.lock:
            if handle.state is not State.ENCODING:
                self._tiers.host.give_back(host)
                wanted = False
            else:
                wanted = True
                handle.to(State.IN_FLIGHT)
                handle.codec, handle.host, handle.nbytes = codec, host, nbytes
                self._let_go(handle, host.numel())
        if not wanted:
            self._abandon(handle, scratch)
            return

        def copy(_stream: Stream | None) -> None:
            copy_bytes(host, scratch, nbytes)
            if self._tiers.verify and not codec.lossless:
                handle.checksum = checksum(scratch[:nbytes])

        if self._tiers.device.unified:  # no link: a job of its own would cost more than the copy
            copy(None)
            self._stored(handle, scratch, event)
            return
        copied = self._tiers.device.submit(copy, role="d2h", after=(event,))
        with self._tiers.lock:
            handle.event = copied
        self._tiers.device.when(copied, lambda: self._stored(handle, scratch, copied))

    def _stored(self, handle: Handle, scratch: torch.Tensor | None, copied: Event) -> None:
        self._tiers.give_back(scratch)
        with self._tiers.lock:
            released = handle.state is State.RELEASED
            if not released:
                handle.to(State.STORED)
            handle.error = copied.error
        if handle.codec is not None:
            self._tiers.counters.encoded(handle.codec.name, handle.raw_nbytes, handle.nbytes)
        if released:
            self._tiers.free(handle)

    def _spill(
        self, handle: Handle, codec: Codec, scratch: torch.Tensor, nbytes: int, event: Event
    ) -> None:
        # The host tier is full. The source is held until the file is written: a disk may be, too.
        if self._tiers.disk is None:
            self._tiers.device.give_back(scratch)
            self._keep(handle, "host_limit", "no spill_dir")
            return
        disk = self._tiers.disk
        with self._tiers.lock:
            wanted = handle.state is State.ENCODING
            if wanted:
                handle.to(State.IN_FLIGHT)
                handle.codec, handle.nbytes = codec, nbytes
        if not wanted:
            self._abandon(handle, scratch)
            return

        def write(_stream: Stream) -> None:
            payload = scratch[:nbytes].cpu()
            if self._tiers.verify and not codec.lossless:
                handle.checksum = checksum(payload)
            handle.file = disk.write(payload)

        written = self._tiers.device.submit(write, role="d2h", after=(event,))
        with self._tiers.lock:
            handle.event = written
        self._tiers.device.when(written, lambda: self._spilled(handle, scratch, written))

    def _spilled(self, handle: Handle, scratch: torch.Tensor, written: Event) -> None:
        if handle.file is None and handle.state is State.IN_FLIGHT:
            self._tiers.device.give_back(scratch)
            self._keep(handle, "disk", written.error or "spill_limit reached")
            return
        with self._tiers.lock:
            self._let_go(handle)
        self._stored(handle, scratch, written)

    def _degrade(self, handle: Handle, x: torch.Tensor, codec: Codec, error: BaseException) -> None:
        raw = get_codec("raw")
        if codec is raw or isinstance(error, MemoryError):  # raw would want as much
            self._keep(handle, "memory" if isinstance(error, MemoryError) else "raw:encode", error)
            return
        self._tiers.counters.fall_back(f"{codec.name}:encode", error)
        with self._tiers.lock:
            handle.event = None
        self._encode(handle, x, raw, "codec")

    def _keep(self, handle: Handle, reason: str, why: object) -> None:
        # The source is still there; so the tensor stays on the device after all.
        if why is not None:
            self._tiers.counters.fall_back(reason, why)
        with self._tiers.lock:
            if handle.state in (State.ENCODING, State.IN_FLIGHT):
                handle.to(State.KEPT)
                self.waits_no_more(handle)
                self._tiers.counters.stay(reason)
            handle.event = None

    def _let_go(self, handle: Handle, host_bytes: int = 0) -> None:
        # Under the lock. The one place where a swapped tensor's own memory is given up: for that
        # much of the host's.
        if handle.source is not None:
            handle.source = None
            self.waits_no_more(handle)
            self._tiers.counters.hold(device=-handle.raw_nbytes, host=host_bytes)

    def _abandon(self, handle: Handle, scratch: torch.Tensor | None) -> None:
        self._tiers.give_back(scratch)
        with self._tiers.lock:
            handle.event = None
