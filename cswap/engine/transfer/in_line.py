"""Encodes and decodes in the thread that calls, for devices whose memory is the host's: `InLine`.

Whether a tensor has a handle (host_executor.py) or a slot (replay/in_line_slot.py), its encoding is
made before pack returns, so there is no state between two threads.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from cswap.codecs.base import checked_bound, checked_size
from cswap.codecs.layout import bytes_of, copy_bytes
from cswap.engine.transfer.resources import DAMAGED, checksum, flat_memory
from cswap.engine.transfer.stored import INDICES, Stored
from cswap.errors import CorruptEncodingError, InternalError, without_frames

if TYPE_CHECKING:
    from cswap.codecs.base import Codec, EncodeKey
    from cswap.engine.transfer.resources import Resources
    from cswap.engine.transfer.stored import Held
    from cswap.stores.disk import DiskFile

_now = time.perf_counter


class NoRoomError(Exception):
    """Neither the host tier nor the disk tier has room; ``args``: reason, why."""


class InLine:
    """Encodes whole tensors into a device's host store, or onto the disk, and decodes them.

    Attributes:
        seed: of stochastic rounding.
    """

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        self._device, self._counters = resources.on_host, resources.counters
        self._host, self._disk, self.seed = resources.host, resources.disk, resources.seed
        self._verify, self._stream = resources.verify, resources.on_host.in_line
        self._watch = resources.watch

    # -------------------------------------------------------------------- out

    def encode(self, x: torch.Tensor, codec: Codec, key: EncodeKey) -> Stored:
        """Encode a tensor. Its encoding is freed after the death of the object that is returned.

        Args:
            x: [n] flat.
            codec: to encode with; must support the dtype.
            key: see `Codec.encode_flat`.

        Raises:
            NoRoomError: there is no room for the encoding.
            MemoryError: there is no memory to encode into.
            Exception: the codec's own.
        """
        stored, start_s = Stored(codec), _now()
        if self._verify:
            stored.checked = "source" if codec.lossless else "payload"
        elif x.dtype in INDICES:  # always: the checksum of an encoding is cheap
            stored.checked = "payload"
        held: Held = []
        try:
            if codec.verbatim:
                self._store(stored, held, x, x.nbytes)
            else:
                bound = checked_bound(codec, x.dtype, x.numel())
                scratch = self._device.host_memory(bound)
                size = codec.encode_flat(x, scratch, key=key, stream=self._stream)
                self._store(stored, held, scratch, checked_size(codec, size, bound))
            if stored.checked == "source":
                stored.checksum = checksum(x)
            self._watch(stored, held, self._free)
        except BaseException:
            self._free(held)
            raise
        stored.encode_s = _now() - start_s
        return stored

    def _store(self, stored: Stored, held: Held, payload: torch.Tensor, nbytes: int) -> None:
        stored.loan, stored.nbytes = self._host.take(nbytes), nbytes
        if stored.loan is None:
            stored.file = self._spill(payload, nbytes)
        held.append((stored.loan, stored.file))
        if stored.loan is not None:
            copy_bytes(stored.loan.buffer, payload, nbytes)
        if stored.checked == "payload":
            stored.checksum = checksum(_bytes(payload, nbytes))

    def _spill(self, payload: torch.Tensor, nbytes: int) -> DiskFile:
        if self._disk is None:
            raise NoRoomError("host_limit", "full, and no spill_dir")
        try:
            return self._disk.write(_bytes(payload, nbytes))
        except OSError as error:
            raise NoRoomError("disk", without_frames(error)) from None

    # ------------------------------------------------------------------- back

    def decode(self, stored: Stored, dtype: torch.dtype, numel: int) -> tuple[torch.Tensor, float]:
        """The values of an encoded tensor, [numel] flat, and the seconds that this took.

        Args:
            stored: its encoding.
            dtype: of the tensor.
            numel: of its elements.

        Raises:
            CorruptEncodingError: the stored bytes were damaged.
            MemoryError: no memory to decode into.
            UnsupportedError: a mode makes tensors without memory.
        """
        start_s, codec = _now(), stored.codec
        out = flat_memory(self._device, dtype, numel)
        loan, nbytes = stored.loan, stored.nbytes
        payload = self._read(stored) if loan is None else loan.buffer[:nbytes]
        if stored.checked == "payload" and checksum(payload) != stored.checksum:
            raise CorruptEncodingError(DAMAGED.format(codec.name, nbytes))
        codec.decode_flat(payload, out, stream=self._stream)
        if stored.checked == "source" and checksum(out) != stored.checksum:
            raise CorruptEncodingError(DAMAGED.format(codec.name, nbytes))
        decode_s = _now() - start_s
        self._counters.decodes.append((codec.name, decode_s))
        return out, decode_s

    def _read(self, stored: Stored) -> torch.Tensor:
        if stored.file is None or self._disk is None:
            raise InternalError("a stored tensor has neither host memory nor a file")
        target = self._device.host_memory(max(stored.nbytes, 1))[: stored.nbytes]
        self._disk.read(stored.file, target)
        return target

    def _free(self, held: Held) -> None:
        # Taken out first: after an interrupt, memory that is lent again must not be given back.
        while held:
            loan, file = held.pop()
            if loan is not None:
                self._host.put_back(loan)
            if file is not None and self._disk is not None:
                self._disk.release(file)


def _bytes(x: torch.Tensor, nbytes: int) -> torch.Tensor:
    # With a storage of its own: the disk tier makes a numpy array of it, see `bytes_of`.
    return torch.from_numpy(bytes_of(x)[:nbytes])
