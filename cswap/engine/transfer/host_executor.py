"""Swapping where host memory is the device's own: an encode out, a decode back, nothing between.

The thread that saves a tensor encodes it, and the one that asks for it decodes it. Others may ask
for a tensor that is being encoded: it then stays.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from cswap.codecs.layout import bytes_of, copy_bytes
from cswap.codecs.registry import get_codec
from cswap.engine.transfer.executor import Executor
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.in_line import InLine
from cswap.engine.transfer.resources import DAMAGED, Patience, checksum
from cswap.engine.transfer.stored import INDICES, Stored
from cswap.errors import CorruptEncodingError, InternalError, without_frames

if TYPE_CHECKING:
    from cswap.codecs.base import Codec
    from cswap.engine.transfer.executor import Memory, WayPlace
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.resources import Resources
    from cswap.stores.disk import DiskFile


_now = time.perf_counter


class _NoRoomError(Exception):
    """Neither the host tier nor the disk tier has room; ``args``: reason, why."""


class HostExecutor(Executor):
    """The executor of a unified device."""

    in_line: InLine

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        super().__init__(resources)
        self.in_line = InLine(resources)
        self._stream = resources.on_host.in_line

    # -------------------------------------------------------------------- out

    def swap_out(
        self, handle: Handle, x: torch.Tensor, codec: Codec, place: WayPlace | None = None
    ) -> None:
        """See `Executor.swap_out`."""
        start_s = _now()
        try:
            self._decide(handle, codec, ((0, x.numel(), 0),))
            with self._lock:
                handle.to(State.LEAVING)
            self._leave(handle, codec, x)
        except BaseException:
            with self._lock:  # see Note [interrupts]
                if handle.state is State.LEAVING:
                    handle.to(State.KEPT)
            raise
        self._counters.exposed(_now() - start_s)

    def _leave(self, handle: Handle, codec: Codec, x: torch.Tensor) -> None:
        while handle.state is State.LEAVING:
            stored = Stored(codec)
            if self._resources.verify:
                stored.checked = "source" if codec.lossless else "payload"
            elif x.dtype in INDICES:  # always: the checksum of an encoding is cheap
                stored.checked = "payload"
            try:
                self._encode(handle, stored, x)
            except _NoRoomError as full:
                self._keep(handle, *full.args)
            except MemoryError as error:  # raw would want as much
                self._keep(handle, "memory", error)
            except Exception as error:
                raw = get_codec("raw")
                if codec is raw:
                    self._keep(handle, "raw:encode", error)
                else:
                    self._counters.fall_back(f"{codec.name}:encode", error)
                    codec = raw
                    self._decide(handle, codec, handle.cuts)
            else:
                self._commit(handle, stored)

    def _encode(self, handle: Handle, stored: Stored, x: torch.Tensor) -> None:
        codec, start_s = stored.codec, _now()
        if codec.verbatim:
            self._store(stored, x, x.nbytes)
        else:
            scratch, nbytes = self.in_line.encoded(x, codec, self._key(handle, codec))
            self._store(stored, scratch, nbytes)
            self.in_line.keep(scratch)
        if stored.checked == "source":
            stored.checksum = checksum(x)
        end_s = _now()
        stored.encode_s = end_s - start_s
        if self._counters.timeline is not None:
            name = "copy out" if codec.verbatim else "encode"
            self._draw(name, handle, stored, (start_s, end_s), x.nbytes)

    def _store(self, stored: Stored, payload: torch.Tensor, nbytes: int) -> None:
        loan = self._resources.host.take(nbytes)
        if loan is None:
            stored.file = self._spill(payload, nbytes)
        else:
            stored.host = loan.buffer
            copy_bytes(loan.buffer, payload, nbytes)
        stored.nbytes = nbytes
        if stored.checked == "payload":
            stored.checksum = checksum(_bytes(payload, nbytes))

    def _spill(self, payload: torch.Tensor, nbytes: int) -> DiskFile:
        if self._resources.disk is None:
            raise _NoRoomError("host_limit", "full, and no spill_dir")
        try:
            return self._resources.disk.write(_bytes(payload, nbytes))
        except OSError as error:
            raise _NoRoomError("disk", without_frames(error)) from None

    def _commit(self, handle: Handle, stored: Stored) -> None:
        # The source has been read for the last time; whether it still matters is seen here.
        host_bytes = 0 if stored.host is None else stored.host.numel()
        modified = handle.modified()
        with self._lock:
            wanted = handle.state is State.LEAVING and not modified
            if wanted:
                handle.stored = stored
                handle.to(State.STORED)
                handle.let_go()
        if not wanted:
            self._resources.free(stored)
            if modified:
                self._keep(handle, "modified", None)
            return
        name, raw_nbytes, nbytes = stored.codec.name, handle.raw_nbytes, stored.nbytes
        self._counters.swapped_out(
            name, raw_nbytes, nbytes, stored.encode_s, device=-raw_nbytes, host=host_bytes
        )
        advice = handle.advice
        if advice is not None and advice.learns:
            advice.note_encoded(name, raw_nbytes, nbytes)

    # ------------------------------------------------------------------- back

    def _fetch(self, handle: Handle, *, expected: bool) -> Memory:
        start_s, stored = _now(), handle.stored
        if stored is None:
            raise InternalError("a stored tensor is nowhere")
        if handle.unpacked == 0:
            self._counters.hits.append(False)
        out = self._flat(handle)
        try:
            result = self._decode(handle, stored, out)
        except CorruptEncodingError as error:
            # The stored bytes are no use: nothing else is to share them.
            handle.error = without_frames(CorruptEncodingError(str(error)))
            raise
        self._counters.exposed(_now() - start_s)
        return result, False

    def _decode(self, handle: Handle, stored: Stored, out: torch.Tensor) -> torch.Tensor:
        codec, nbytes = stored.codec, stored.nbytes
        host = stored.host
        payload = self._read(stored) if host is None else host[:nbytes]
        start_s = _now()
        if stored.checked == "payload" and checksum(payload) != stored.checksum:
            raise CorruptEncodingError(DAMAGED.format(codec.name, nbytes))
        codec.decode_flat(payload, out, stream=self._stream)
        if stored.checked == "source" and checksum(out) != stored.checksum:
            raise CorruptEncodingError(DAMAGED.format(codec.name, nbytes))
        result = self._in_layout(handle, out)
        end_s = _now()
        decode_s, advice = end_s - start_s, handle.advice
        self._counters.took(codec.name, decode_s=decode_s)
        if self._counters.timeline is not None:
            name = "copy in" if codec.verbatim else "decode"
            self._draw(name, handle, stored, (start_s, end_s), nbytes)
        if advice is not None and advice.learns and not handle.unpacked:
            advice.note_round_trip(codec.name, stored.encode_s + decode_s)
        return result

    def _draw(
        self, name: str, handle: Handle, stored: Stored, span_s: tuple[float, float], nbytes: int
    ) -> None:
        timeline = self._counters.timeline
        if timeline is not None:
            timeline.job(name, "codec", handle.label, span_s, stored.codec.name, nbytes)

    def _read(self, stored: Stored) -> torch.Tensor:
        disk = self._resources.disk
        if stored.file is None or disk is None:
            raise InternalError("a stored tensor has neither host memory nor a file")
        target = self._device.host_memory(max(stored.nbytes, 1))[: stored.nbytes]
        disk.read(stored.file, target)
        return target

    def settle(self, handle: Handle) -> None:
        """See `Executor.settle`: another thread may be encoding it."""
        patience = Patience()
        while handle.state is State.LEAVING:
            patience.pause(handle.state.value)
        with self._lock:  # whoever has moved it is done with that
            pass


def _bytes(x: torch.Tensor, nbytes: int) -> torch.Tensor:
    # With a storage of its own: the disk tier makes a numpy array of it, see `bytes_of`.
    return torch.from_numpy(bytes_of(x)[:nbytes])
