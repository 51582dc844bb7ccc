"""Swap-in: from the store to decoded memory. See Note [who holds what, until when]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.layout import copy_bytes, empty_strided, torch_dtype, unflatten_into
from cswap.engine.handle import State
from cswap.engine.tiers import DAMAGED, checksum
from cswap.errors import CorruptEncodingError, InternalError

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Stream
    from cswap.devices.base import Event, Role
    from cswap.engine.handle import Handle
    from cswap.engine.tiers import Tiers


class SwapIn:
    """Copies back and decodes."""

    def __init__(self, tiers: Tiers) -> None:
        """Args: tiers: shared with swap-out."""
        self._tiers = tiers

    def fetch(self, handle: Handle, role: Role) -> Event:
        """Bring a handle, now in state FETCHING, back; the event of its decode.

        Raises:
            MemoryError: no memory to decode into; the handle is as it was stored.
        """
        codec, device = handle.codec, self._tiers.device
        if codec is None:
            raise InternalError("a stored handle has no codec")
        dtype = torch_dtype(handle.meta.dtype)
        try:
            out = device.allocate(dtype, handle.raw_nbytes // dtype.itemsize)
            result = empty_strided(handle.meta, out.device) if handle.gathered else out
            payload, arrived, scratch = self._bring(handle)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for both
            with self._tiers.lock:
                handle.to(State.STORED)
            raise MemoryError(f"swap-in of {handle.raw_nbytes} bytes: {error}") from error

        def job(stream: Stream) -> None:
            if self._tiers.verify and not codec.lossless and checksum(payload) != handle.checksum:
                raise CorruptEncodingError(DAMAGED.format(codec.name, handle.nbytes))
            codec.decode_flat(payload, out, stream=stream)
            if handle.gathered:
                unflatten_into(out, handle.meta, result)
            if self._tiers.verify and codec.lossless and checksum(out) != handle.checksum:
                raise CorruptEncodingError(DAMAGED.format(codec.name, handle.nbytes))

        self._tiers.counters.hold(device=handle.raw_nbytes)
        if codec.verbatim and not device.unified:  # the copy is all there is to do
            role = "h2d"
        event = device.submit(job, role=role, after=(*arrived, device.now()))
        with self._tiers.lock:
            if handle.state is State.FETCHING:
                handle.event, handle.result = event, result
        device.when(event, lambda: self._fetched(handle, event, scratch))
        return event

    def _bring(self, handle: Handle) -> tuple[torch.Tensor, tuple[Event, ...], torch.Tensor | None]:
        # The payload where the codec can read it, the events to wait for, and scratch to give back.
        device, nbytes, file = self._tiers.device, handle.nbytes, handle.file
        after: tuple[Event, ...] = () if handle.event is None else (handle.event,)
        host = handle.host
        if file is not None and self._tiers.disk is not None:
            disk, staged = self._tiers.disk, device.host_memory(max(nbytes, 1))
            after = (
                device.submit(lambda _: disk.read(file, staged[:nbytes]), role="h2d", after=after),
            )
            host = staged
        if host is None:
            raise InternalError("a stored handle has neither host memory nor a file")
        if device.unified or (handle.codec is not None and handle.codec.verbatim):
            return host[:nbytes], after, None
        scratch = device.scratch(nbytes)
        source = host
        copied = device.submit(
            lambda _: copy_bytes(scratch, source, nbytes), role="h2d", after=after
        )
        return scratch[:nbytes], (copied,), scratch

    def _fetched(self, handle: Handle, event: Event, scratch: torch.Tensor | None) -> None:
        self._tiers.give_back(scratch)
        if handle.codec is not None:
            self._tiers.counters.spent(handle.codec.name, decode_s=event.elapsed_s)
        with self._tiers.lock:
            released = handle.state is State.RELEASED
            if handle.state is State.FETCHING:
                handle.to(State.READY if event.error is None else State.STORED)
            if event.error is not None or released:
                handle.result = None
        if event.error is not None or released:
            self._tiers.counters.hold(device=-handle.raw_nbytes)
        if released:
            self._tiers.free(handle)
