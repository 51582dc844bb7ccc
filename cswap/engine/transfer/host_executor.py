"""Swapping where host memory is the device's own: an encode out, a decode back, nothing between.

The thread that saves a tensor encodes it, and the one that asks for it decodes it. Others may ask
for a tensor that is being encoded: it then stays.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

import torch

from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.layout import bytes_of, copy_bytes, unflatten_into
from cswap.codecs.registry import get_codec
from cswap.engine.transfer.executor import Executor
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.in_line import InLine
from cswap.engine.transfer.resources import DAMAGED, Patience, checksum
from cswap.engine.transfer.section import INDICES, Section
from cswap.errors import CorruptEncodingError, InternalError, without_frames

if TYPE_CHECKING:
    from cswap.codecs.base import Codec
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.resources import Resources
    from cswap.stores.disk import DiskFile


_Stored: TypeAlias = "tuple[torch.Tensor | None, DiskFile | None, int]"
"""Where an encoding was put: the store's buffer, or the file; and its bytes."""

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
        self._stream = resources.device.in_line

    # -------------------------------------------------------------------- out

    def swap_out(self, handle: Handle, x: torch.Tensor, codec: Codec) -> None:
        """See `Executor.swap_out`."""
        start_s, section = _now(), Section(0, 0, x.numel(), codec)
        if self._resources.verify or x.dtype in INDICES:
            section.checked = self._what_to_check(x.dtype, codec)
        try:
            with self._lock:
                handle.sections = [section]
                self._depart(handle, codec)
            self._leave(handle, section, x)
        except BaseException:
            self._take_back(handle)
            raise
        self._counters.exposed(_now() - start_s)

    def _leave(self, handle: Handle, section: Section, x: torch.Tensor) -> None:
        while handle.state is State.LEAVING:
            codec = section.codec
            try:
                stored = self._encode(handle, section, x)
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
                    section.codec = raw
            else:
                self._commit(handle, section, stored)

    def _encode(self, handle: Handle, section: Section, x: torch.Tensor) -> _Stored:
        codec, start_s = section.codec, _now()
        if codec.verbatim:
            stored = self._store(section, x, x.nbytes)
        else:
            key = DEFAULT_KEY
            if not codec.lossless:
                key = section.key(self._resources.seed, handle.position, handle.step)
            scratch, nbytes = self.in_line.encoded(x, codec, key)
            stored = self._store(section, scratch, nbytes)
            self.in_line.keep(scratch)
        if section.checked == "source":
            section.checksum = checksum(x)
        end_s = _now()
        section.encode_s = end_s - start_s
        if self._counters.timeline is not None:
            name = "copy out" if codec.verbatim else "encode"
            self._resources.draw(name, "codec", handle, section, (start_s, end_s), x.nbytes)
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
            wanted = handle.state is State.LEAVING and not modified
            if wanted:
                section.host, section.file, section.nbytes = host, file, nbytes
                handle.to(State.STORED)
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
        start_s = _now()
        out, result = self._allocate(handle)
        try:
            self._decode(handle, out, result)
        except CorruptEncodingError as error:
            # The stored bytes are no use: nothing else is to share them.
            handle.error = without_frames(CorruptEncodingError(str(error)))
            raise
        self._counters.exposed(_now() - start_s)
        return result

    def _decode(self, handle: Handle, out: torch.Tensor, result: torch.Tensor) -> None:
        section = handle.sections[0]
        codec, nbytes = section.codec, section.nbytes
        host = section.host
        payload = self._read(section) if host is None else host[:nbytes]
        start_s = _now()
        if section.checked == "payload" and checksum(payload) != section.checksum:
            raise CorruptEncodingError(DAMAGED.format(codec.name, nbytes))
        codec.decode_flat(payload, out, stream=self._stream)
        if section.checked == "source" and checksum(out) != section.checksum:
            raise CorruptEncodingError(DAMAGED.format(codec.name, nbytes))
        if handle.gathered:
            unflatten_into(out, handle.meta, result)
        end_s = _now()
        section.decode_s = end_s - start_s
        self._counters.decoded(codec.name, section.decode_s)
        self._resources.tell(handle)
        if self._counters.timeline is not None:
            name = "copy in" if codec.verbatim else "decode"
            self._resources.draw(name, "codec", handle, section, (start_s, end_s), nbytes)

    def _read(self, section: Section) -> torch.Tensor:
        disk = self._resources.disk
        if section.file is None or disk is None:
            raise InternalError("a stored section has neither host memory nor a file")
        target = self._device.host_memory(max(section.nbytes, 1))[: section.nbytes]
        disk.read(section.file, target)
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
