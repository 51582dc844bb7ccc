"""The swapping executor: moves one handle out and back, on any device.

Note [who holds what, until when]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
source      the tensor's own memory: held until the encode's event has fired (until the file is
            written, if the encoding goes to disk), dropped in `_encoded`.
scratch     the encoder's output: from `_encode` to `_stored`.
host, file  the store's copy: from `_encoded` until release; autograd may ask again
            (retain_graph), so a fetch does not give it up.
result      decoded memory: from `_fetch` until every packed view has been asked for, or until
            `drop_result`.
Released while a job is under way: that job's callback frees what it held.

Jobs and callbacks run on threads of the device's choice. State changes under `lock`; no codec, no
copy and no wait does.
"""

from __future__ import annotations

import threading
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cswap.codecs.base import EncodeKey
from cswap.codecs.layout import copy_bytes, empty_strided, torch_dtype, unflatten_into
from cswap.codecs.registry import get_codec
from cswap.engine.handle import State
from cswap.errors import CorruptEncodingError, InternalError

if TYPE_CHECKING:
    from cswap.codecs.base import Codec, LateSize, Stream
    from cswap.devices.base import Device, Event, Role
    from cswap.engine.handle import Handle
    from cswap.engine.stats import Counters
    from cswap.stores.disk import DiskStore
    from cswap.stores.host import HostStore


@dataclass(slots=True)
class _Output:
    """What an encode job leaves behind: its scratch memory, and how much of it is in use."""

    scratch: torch.Tensor | None = None
    size: int | LateSize = 0


class Executor:
    """Runs swap-out and swap-in on one device."""

    def __init__(
        self,
        device: Device,
        host: HostStore,
        disk: DiskStore | None,
        counters: Counters,
        *,
        seed: int,
        verify: bool,
    ) -> None:
        self.lock = threading.Lock()
        self._device = device
        self._host = host
        self._disk = disk
        self._counters = counters
        self._seed = seed
        self._verify = verify
        self._waiting_bytes = 0

    # ------------------------------------------------------------------ out

    def swap_out(self, handle: Handle, x: torch.Tensor, codec: Codec) -> None:
        """Encode a kept handle and move it to the store; returns before that is done.

        Args:
            handle: kept, and not modified since it was saved.
            x: its elements, [n] flat: the source itself, or a dense copy if gathered.
            codec: to encode with; must support the dtype.
        """
        with self.lock:
            handle.to(State.ENCODING)
            self._waiting_bytes += handle.raw_nbytes
            backlog = self._waiting_bytes > self._device.backlog_bytes
        if backlog:
            start = time.perf_counter()
            self._encode(handle, x, codec, "compute")
            self._counters.exposed(time.perf_counter() - start)
        else:
            self._encode(handle, x, codec, "codec")

    def _encode(self, handle: Handle, x: torch.Tensor, codec: Codec, role: Role) -> None:
        out = _Output()
        key = EncodeKey(self._seed, handle.position, handle.step)

        def job(stream: Stream) -> None:
            if handle.state is not State.ENCODING:  # wanted back, or released, meanwhile
                return
            # Taken here and not at submit: encodes that wait their turn hold no scratch.
            out.scratch = self._device.scratch(codec.bound(x.dtype, x.numel()))
            start = time.perf_counter()
            out.size = codec.encode_flat(x, out.scratch, key=key, stream=stream)
            self._counters.spent(codec.name, encode_s=time.perf_counter() - start)
            if self._verify and codec.lossless:
                handle.checksum = _checksum(x)

        event = self._device.submit(job, role=role, after=(self._device.now(),))
        with self.lock:
            if handle.state is State.ENCODING and handle.event is None:
                handle.event = event

        def encoded() -> None:
            if event.error is not None and handle.state is State.ENCODING:
                self._give_back(out.scratch)
                self._degrade(handle, x, codec, event.error)
            elif handle.state is not State.ENCODING or out.scratch is None:
                self._abandon(handle, out.scratch)
            else:
                self._encoded(handle, codec, out.scratch, out.size, event)

        self._device.when(event, encoded)

    def _encoded(
        self,
        handle: Handle,
        codec: Codec,
        scratch: torch.Tensor,
        size: int | LateSize,
        event: Event,
    ) -> None:
        if handle.modified():
            self._device.give_back(scratch)
            self._keep(handle, "modified", None)
            return
        nbytes = size if isinstance(size, int) else size.value()
        host = self._host.take(nbytes)
        if host is None:
            self._spill(handle, codec, scratch, nbytes, event)
            return
        with self.lock:
            if handle.state is not State.ENCODING:
                self._host.give_back(host)
                wanted = False
            else:
                wanted = True
                handle.to(State.IN_FLIGHT)
                handle.codec, handle.host, handle.nbytes = codec, host, nbytes
                self._let_go(handle)
        if not wanted:
            self._abandon(handle, scratch)
            return
        self._counters.hold(host=host.numel())

        def copy(_stream: Stream) -> None:
            copy_bytes(host[:nbytes], scratch[:nbytes])
            if self._verify and not codec.lossless:
                handle.checksum = _checksum(scratch[:nbytes])

        # Where there is no link, a job of its own for the copy would cost more than the copy.
        role: Role = "compute" if self._device.unified else "d2h"
        copied = self._device.submit(copy, role=role, after=(event,))
        with self.lock:
            handle.event = copied
        self._device.when(copied, lambda: self._stored(handle, scratch, copied))

    def _stored(self, handle: Handle, scratch: torch.Tensor, copied: Event) -> None:
        self._device.give_back(scratch)
        with self.lock:
            released = handle.state is State.RELEASED
            if not released:
                handle.to(State.STORED)
            handle.error = copied.error
        if handle.codec is not None:
            self._counters.encoded(handle.codec.name, handle.raw_nbytes, handle.nbytes)
        if released:
            self._free_store(handle)

    def _spill(
        self, handle: Handle, codec: Codec, scratch: torch.Tensor, nbytes: int, event: Event
    ) -> None:
        # The host tier is full. The source is held until the file is written: a disk may be, too.
        if self._disk is None:
            self._device.give_back(scratch)
            self._keep(handle, "host_limit", "no spill_dir")
            return
        disk = self._disk
        with self.lock:
            wanted = handle.state is State.ENCODING
            if wanted:
                handle.to(State.IN_FLIGHT)
                handle.codec, handle.nbytes = codec, nbytes
        if not wanted:
            self._abandon(handle, scratch)
            return

        def write(_stream: Stream) -> None:
            payload = scratch[:nbytes].cpu()
            if self._verify and not codec.lossless:
                handle.checksum = _checksum(payload)
            handle.file = disk.write(payload)

        written = self._device.submit(write, role="d2h", after=(event,))
        with self.lock:
            handle.event = written
        self._device.when(written, lambda: self._spilled(handle, scratch, written))

    def _spilled(self, handle: Handle, scratch: torch.Tensor, written: Event) -> None:
        if handle.file is None and handle.state is State.IN_FLIGHT:
            self._device.give_back(scratch)
            self._keep(handle, "disk", written.error or "spill_limit reached")
            return
        with self.lock:
            self._let_go(handle)
        self._stored(handle, scratch, written)

    def _degrade(self, handle: Handle, x: torch.Tensor, codec: Codec, error: BaseException) -> None:
        raw = get_codec("raw")
        if codec is raw or isinstance(error, MemoryError):  # raw would want as much
            self._keep(handle, "memory" if isinstance(error, MemoryError) else "raw:encode", error)
            return
        self._counters.fall_back(f"{codec.name}:encode", error)
        with self.lock:
            handle.event = None
        self._encode(handle, x, raw, "codec")

    def _keep(self, handle: Handle, reason: str, why: object) -> None:
        # The source is still there; so the tensor stays on the device after all.
        if why is not None:
            self._counters.fall_back(reason, why)
        with self.lock:
            if handle.state in (State.ENCODING, State.IN_FLIGHT):
                handle.to(State.KEPT)
                self._waiting_bytes -= handle.raw_nbytes
                self._counters.stay(reason)
            handle.event = None

    def _let_go(self, handle: Handle) -> None:
        # Under the lock. The one place where a swapped tensor's own memory is given up.
        if handle.source is not None:
            handle.source = None
            self._waiting_bytes -= handle.raw_nbytes
            self._counters.hold(device=-handle.raw_nbytes)

    def _give_back(self, scratch: torch.Tensor | None) -> None:
        if scratch is not None:
            self._device.give_back(scratch)

    def _abandon(self, handle: Handle, scratch: torch.Tensor | None) -> None:
        self._give_back(scratch)
        with self.lock:
            handle.event = None

    # ------------------------------------------------------------------- in

    def prefetch(self, handle: Handle) -> bool:
        """Start to bring a stored handle back, beside the computation; whether it was stored."""
        with self.lock:
            if handle.state is not State.STORED:
                return False
            handle.to(State.FETCHING)
            handle.prefetched = True
        try:
            self._fetch(handle, "codec")
        except MemoryError as error:  # unpack will try again, and says so if it must
            self._counters.fall_back("prefetch", error)
            return False
        return True

    def memory(self, handle: Handle) -> torch.Tensor:
        """The tensor's memory, [n] flat or gathered: its own if still held, else decoded.

        Computation issued from here on may read it.

        Raises:
            CorruptEncodingError: what came back is not what was stored.
            MemoryError: no memory to decode into.
        """
        while True:
            event: Event | None = None
            with self.lock:
                if handle.error is not None:
                    raise handle.error
                if handle.state is State.ENCODING:
                    # Still in its own memory, and wanted now: do not move it at all.
                    handle.to(State.KEPT)
                    self._waiting_bytes -= handle.raw_nbytes
                    self._counters.stay("wanted_early")
                if handle.state is State.KEPT and handle.source is not None:
                    return handle.source
                if handle.state is State.READY and handle.result is not None:
                    return self._hit(handle, handle.result)
                if handle.state is State.STORED:
                    alive = handle.recall()
                    if alive is not None:
                        return alive
                    handle.to(State.FETCHING)
                    handle.prefetched = False
                elif handle.event is not None:
                    event = handle.event
            start = time.perf_counter()
            fetching = event is None or handle.state is State.FETCHING
            if event is None:
                event = self._fetch(handle, "compute")
            if fetching:
                self._device.join(event)
            else:
                self._device.wait(event)
            self._counters.exposed(time.perf_counter() - start)
            if fetching and event.error is not None:
                raise event.error  # on the way out, errors were dealt with
            if handle.state is State.FETCHING and handle.result is not None:
                return self._hit(handle, handle.result)  # the device orders it before its use

    def _hit(self, handle: Handle, result: torch.Tensor) -> torch.Tensor:
        if handle.unpacked == 0:
            self._counters.fetched(hit=handle.prefetched)
        return result

    def _fetch(self, handle: Handle, role: Role) -> Event:
        codec, device = handle.codec, self._device
        if codec is None:
            raise InternalError("a stored handle has no codec")
        dtype = torch_dtype(handle.meta.dtype)
        try:
            out = device.allocate(dtype, handle.raw_nbytes // dtype.itemsize)
            result = empty_strided(handle.meta, out.device) if handle.gathered else out
            payload, arrived, scratch = self._bring(handle)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for both
            with self.lock:
                handle.to(State.STORED)
            raise MemoryError(f"swap-in of {handle.raw_nbytes} bytes: {error}") from error

        def job(stream: Stream) -> None:
            start = time.perf_counter()
            if self._verify and not codec.lossless and _checksum(payload) != handle.checksum:
                raise CorruptEncodingError(_DAMAGED.format(codec.name, handle.nbytes))
            codec.decode_flat(payload, out, stream=stream)
            if handle.gathered:
                unflatten_into(out, handle.meta, result)
            self._counters.spent(codec.name, decode_s=time.perf_counter() - start)
            if self._verify and codec.lossless and _checksum(out) != handle.checksum:
                raise CorruptEncodingError(_DAMAGED.format(codec.name, handle.nbytes))

        self._counters.hold(device=handle.raw_nbytes)
        event = device.submit(job, role=role, after=(*arrived, device.now()))
        with self.lock:
            if handle.state is State.FETCHING:
                handle.event, handle.result = event, result
        device.when(event, lambda: self._fetched(handle, event, scratch))
        return event

    def _bring(self, handle: Handle) -> tuple[torch.Tensor, tuple[Event, ...], torch.Tensor | None]:
        # The payload where the codec can read it, the events to wait for, and scratch to give back.
        device, nbytes, file = self._device, handle.nbytes, handle.file
        after: tuple[Event, ...] = () if handle.event is None else (handle.event,)
        host = handle.host
        if file is not None and self._disk is not None:
            disk, staged = self._disk, device.host_memory(max(nbytes, 1))
            after = (
                device.submit(lambda _: disk.read(file, staged[:nbytes]), role="h2d", after=after),
            )
            host = staged
        if host is None:
            raise InternalError("a stored handle has neither host memory nor a file")
        if device.unified:
            return host[:nbytes], after, None
        scratch = device.scratch(nbytes)
        source = host[:nbytes]
        copied = device.submit(
            lambda _: copy_bytes(scratch[:nbytes], source), role="h2d", after=(*after, device.now())
        )
        return scratch[:nbytes], (copied,), scratch

    def _fetched(self, handle: Handle, event: Event, scratch: torch.Tensor | None) -> None:
        self._give_back(scratch)
        with self.lock:
            released = handle.state is State.RELEASED
            if handle.state is State.FETCHING:
                handle.to(State.READY if event.error is None else State.STORED)
            if event.error is not None or released:
                handle.result = None
        if event.error is not None or released:
            self._counters.hold(device=-handle.raw_nbytes)
        if released:
            self._free_store(handle)

    def drop_result(self, handle: Handle) -> None:
        """Let go of the decoded memory; users of it keep it alive themselves."""
        with self.lock:
            if handle.state is State.READY:
                handle.to(State.STORED)
                handle.forget()
                self._counters.hold(device=-handle.raw_nbytes)

    def release(self, handle: Handle) -> None:
        """Nobody can ask for the handle any more: free what no job needs."""
        with self.lock:
            before = handle.state
            if before is State.RELEASED:
                return
            handle.to(State.RELEASED)
            if before in (State.KEPT, State.ENCODING):
                handle.source = None
                self._counters.hold(device=-handle.raw_nbytes)
                if before is State.ENCODING:
                    self._waiting_bytes -= handle.raw_nbytes
            if before is State.READY:
                handle.result = None
                self._counters.hold(device=-handle.raw_nbytes)
        if before in (State.STORED, State.READY):
            self._free_store(handle)

    def _free_store(self, handle: Handle) -> None:
        host, file = handle.host, handle.file
        handle.host = handle.file = None
        if host is not None:
            self._host.give_back(host)
            self._counters.hold(host=-host.numel())
        if file is not None and self._disk is not None:
            self._disk.release(file)

    def settle(self, handle: Handle) -> None:
        """Block until nothing is under way for the handle."""
        while handle.event is not None and not handle.event.query():
            self._device.wait(handle.event)


_DAMAGED = "verify: a tensor encoded by {} to {} bytes came back changed."


def _checksum(x: torch.Tensor) -> int:
    return zlib.crc32(x.view(torch.uint8).cpu().numpy().data)
