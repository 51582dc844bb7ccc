"""Swapping where host memory is the device's own: an encode out, a decode back, nothing between.

A job does all of it: on a worker, beside the computation, or in line where too much waits. A job
whose worker died is run again by the thread that waits for it, so it looks at the state first.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from cswap.codecs.base import DEFAULT_KEY, checked_bound, checked_size
from cswap.codecs.layout import bytes_of, copy_bytes, unflatten_into
from cswap.codecs.registry import get_codec
from cswap.engine.transfer.executor import Executor
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.in_line import InLine
from cswap.engine.transfer.resources import DAMAGED, Patience, checksum, under_way
from cswap.engine.transfer.section import INDICES, Section
from cswap.errors import CorruptEncodingError, InternalError, without_frames

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec, Stream
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.resources import Resources
    from cswap.stores.disk import DiskFile


_Stored: TypeAlias = "tuple[torch.Tensor | None, DiskFile | None, int]"
"""Where an encoding was put: the store's buffer, or the file; and its bytes."""


# A codec's time is that of its thread alone, whose clock costs a system call of a microsecond. For
# a plain copy, which is short, the clock on the wall will do.
_thread_s, _wall_s = time.thread_time, time.perf_counter


class _NoRoomError(Exception):
    """Neither the host tier nor the disk tier has room; ``args``: reason, why."""


class HostExecutor(Executor):
    """The executor of a unified device.

    Attributes:
        overlaps: whether encodes run beside the computation.
        in_line: encodes tensors without handles.
    """

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        super().__init__(resources)
        self._stream = resources.device.in_line
        self.in_line = self._in_line = InLine(resources)
        self._waiting_bytes = 0
        self.overlaps = resources.device.overlaps
        self._backlog_bytes = resources.device.backlog_bytes

    # -------------------------------------------------------------------- out

    def swap_out(self, handle: Handle, x: torch.Tensor, codec: Codec) -> None:
        """See `Executor.swap_out`."""
        section = Section(0, 0, x.numel(), codec)
        if self._resources.verify or x.dtype in INDICES:
            section.checked = self._what_to_check(x.dtype, codec)
        try:
            with self._lock:
                handle.sections = [section]
                self._depart(handle, codec)
                self._waiting_bytes += handle.raw_nbytes
                beside = self.overlaps and self._waiting_bytes <= self._backlog_bytes
            if beside:
                handle.event = self._device.submit(partial(self._leave, handle, x), role="codec")
            else:
                start = time.perf_counter()
                self._leave(handle, x, self._stream)
                self._counters.exposed(time.perf_counter() - start)
        except BaseException:
            self._take_back(handle)
            raise

    def _leave(self, handle: Handle, x: torch.Tensor, stream: Stream | None) -> None:
        section = handle.sections[0]
        while handle.state is State.LEAVING and handle.token() is not None:
            codec = section.codec
            try:
                stored = self._encode(handle, section, x, stream)
            except _NoRoomError as full:
                self._keep(handle, *full.args)
            except MemoryError as error:  # raw would want as much
                self._keep(handle, "memory", error)
            except BaseException as error:
                if stream is self._stream and not isinstance(error, Exception):
                    raise  # an interrupt; workers get none, but a codec may raise anything
                raw = get_codec("raw")
                if codec is raw:
                    self._keep(handle, "raw:encode", error)
                else:
                    self._counters.fall_back(f"{codec.name}:encode", error)
                    section.codec = raw
            else:
                self._commit(handle, section, stored)

    def _encode(
        self, handle: Handle, section: Section, x: torch.Tensor, stream: Stream | None
    ) -> _Stored:
        codec, began = section.codec, time.perf_counter()
        clock = _wall_s if codec.verbatim else _thread_s
        start = clock()
        if codec.verbatim:
            stored = self._store(section, x, x.nbytes)
        else:
            bound = checked_bound(codec, x.dtype, x.numel())
            here = stream is self._stream
            scratch = self._in_line.scratch(bound) if here else self._device.scratch(bound, "codec")
            key = DEFAULT_KEY
            if not codec.lossless:
                key = section.key(self._resources.seed, handle.position, handle.step)
            size = codec.encode_flat(x, scratch, key=key, stream=stream)
            stored = self._store(section, scratch, checked_size(codec, size, bound))
            (self._in_line.keep if here else self._device.give_back)(scratch)
        if section.checked == "source":
            section.checksum = checksum(x)
        section.encode_s = clock() - start
        if stream is not self._stream:
            self._counters.beside_s += section.encode_s
        if self._counters.timeline is not None:
            name = "copy out" if codec.verbatim else "encode"
            self._draw(name, handle, section, began, x.nbytes)
        return stored

    def _store(self, section: Section, payload: torch.Tensor, nbytes: int) -> _Stored:
        loan = self._resources.host.take(nbytes)
        if loan is None:
            host, file = None, self._spill(payload, nbytes)
        else:
            host, file = loan.buffer, None
            copy_bytes(host, payload, nbytes)
        if section.checked == "payload":
            section.checksum = checksum(_bytes(payload, nbytes))
        return host, file, nbytes

    def _spill(self, payload: torch.Tensor, nbytes: int) -> DiskFile:
        if self._resources.disk is None:
            raise _NoRoomError("host_limit", "full, and no spill_dir")
        try:
            file = self._resources.disk.write(_bytes(payload, nbytes))
        except OSError as error:
            raise _NoRoomError("disk", without_frames(error)) from None
        if file is None:
            raise _NoRoomError("disk", "spill_limit reached")
        return file

    def _commit(self, handle: Handle, section: Section, stored: _Stored) -> None:
        # The source has been read for the last time; whether it still matters is seen here.
        host, file, nbytes = stored
        host_bytes = 0 if host is None else host.numel()
        modified = handle.modified()
        with self._lock:
            leaves = handle.state is State.LEAVING and handle.token() is not None
            wanted = leaves and not modified
            if wanted:
                section.host, section.file, section.nbytes = host, file, nbytes
                handle.to(State.STORED)
                self._waiting_bytes -= handle.raw_nbytes
                handle.let_go()
        if not wanted:
            self._drop(stored)
            if modified:
                self._keep(handle, "modified", None)
            return
        name, raw_nbytes = section.codec.name, handle.raw_nbytes
        self._counters.swapped_out(
            name, raw_nbytes, nbytes, section.encode_s, device=-raw_nbytes, host=host_bytes
        )
        advice = handle.advice
        if advice is not None and advice.learns:
            advice.note_encoded(name, raw_nbytes, nbytes)

    def _drop(self, stored: _Stored) -> None:
        host, file, _ = stored
        if host is not None:
            self._resources.host.give_back(host)
        if file is not None and self._resources.disk is not None:
            self._resources.disk.release(file)

    # ------------------------------------------------------------------- back

    def _fetch(self, handle: Handle) -> torch.Tensor:
        start = time.perf_counter()
        out, result = self._allocate(handle)
        try:
            self._decode(handle, out, result, self._stream)
        except CorruptEncodingError as error:
            self._damaged(handle, error)
            raise
        self._counters.exposed(time.perf_counter() - start)
        return result

    def _prefetch(self, handle: Handle) -> None:
        try:
            out, result = self._allocate(handle)
        except MemoryError:
            with self._lock:
                self._move(handle, State.STORED)
            raise
        job = partial(self._bring, handle, out, result)
        handle.event = self._device.submit(job, role="codec")

    def _bring(
        self, handle: Handle, out: torch.Tensor, result: torch.Tensor, stream: Stream | None
    ) -> None:
        if handle.state is not State.FETCHING:  # released meanwhile
            return
        try:
            self._decode(handle, out, result, stream)
        except Exception as error:
            if isinstance(error, CorruptEncodingError):
                self._damaged(handle, error)
            with self._lock:
                if handle.state is State.FETCHING:
                    self._move(handle, State.STORED)
            raise
        with self._lock:
            owner = handle.token()
            if handle.state is State.FETCHING:
                if owner is not None:
                    owner.result = result
                self._move(handle, State.READY)

    def _decode(
        self, handle: Handle, out: torch.Tensor, result: torch.Tensor, stream: Stream | None
    ) -> None:
        section = handle.sections[0]
        codec, nbytes = section.codec, section.nbytes
        payload = self._payload(section)
        began, clock = time.perf_counter(), _wall_s if codec.verbatim else _thread_s
        start = clock()
        if section.checked == "payload" and checksum(payload) != section.checksum:
            raise CorruptEncodingError(DAMAGED.format(codec.name, nbytes))
        codec.decode_flat(payload, out, stream=stream)
        if section.checked == "source" and checksum(out) != section.checksum:
            raise CorruptEncodingError(DAMAGED.format(codec.name, nbytes))
        if handle.gathered:
            unflatten_into(out, handle.meta, result)
        section.decode_s = clock() - start
        if stream is not self._stream:
            self._counters.beside_s += section.decode_s
        self._counters.decoded(codec.name, section.decode_s)
        self._resources.tell(handle)
        if self._counters.timeline is not None:
            name = "copy in" if codec.verbatim else "decode"
            self._draw(name, handle, section, began, nbytes)

    def _draw(
        self, name: str, handle: Handle, section: Section, began_s: float, nbytes: int
    ) -> None:
        span_s = began_s, time.perf_counter()
        self._resources.draw(name, "codec", handle, section, span_s, nbytes)

    def _payload(self, section: Section) -> torch.Tensor:
        host = section.host
        if host is not None:
            return host if host.numel() == section.nbytes else host[: section.nbytes]
        disk = self._resources.disk
        if section.file is None or disk is None:
            raise InternalError("a stored section has neither host memory nor a file")
        target = self._device.host_memory(max(section.nbytes, 1))[: section.nbytes]
        disk.read(section.file, target)
        return target

    def _damaged(self, handle: Handle, error: CorruptEncodingError) -> None:
        # The stored bytes are no use: nothing else is to share them.
        handle.error = without_frames(CorruptEncodingError(str(error)))

    def _leaves_no_more(self, handle: Handle) -> None:
        self._waiting_bytes -= handle.raw_nbytes

    def recount(self, handles: list[Handle]) -> None:
        """See `Executor.recount`."""
        with self._lock:
            leaving = (h.raw_nbytes for h in handles if h.state is State.LEAVING)
            self._waiting_bytes = sum(leaving)

    def settle(self, handle: Handle) -> None:
        """See `Executor.settle`."""
        patience = Patience()
        while under_way(handle):
            event = handle.event
            if event is not None:
                self._device.wait(event)
            if handle.event is event:  # or another thread is about to submit
                patience.pause(handle.state.value)
        with self._lock:  # whoever has moved it is done with that
            pass


def _bytes(x: torch.Tensor, nbytes: int) -> torch.Tensor:
    # With a storage of its own: the disk tier makes a numpy array of it, see `bytes_of`.
    import torch

    return torch.from_numpy(bytes_of(x)[:nbytes])
