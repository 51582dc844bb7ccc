"""Swap-in: from the store to decoded memory. See Note [who holds what, until when]."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from cswap.codecs.base import checked_bound, checked_size
from cswap.codecs.layout import copy_bytes, empty_strided, flatten, torch_dtype, unflatten_into
from cswap.engine.handle import State
from cswap.engine.part import encode_key
from cswap.engine.tiers import DAMAGED, checksum
from cswap.errors import CorruptEncodingError, InternalError, to_raise

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.advisor.advisor import Advice
    from cswap.codecs.base import Stream
    from cswap.devices.base import Event, Role
    from cswap.engine.handle import Handle
    from cswap.engine.part import Part
    from cswap.engine.tiers import Tiers


class _Staged(NamedTuple):
    """A part's payload on its way to the decoder.

    Attributes:
        payload: [nbytes] uint8 where the codec reads it.
        after: events to wait for before that.
        scratch: to be given back after the decode, or None.
    """

    payload: torch.Tensor
    after: tuple[Event, ...]
    scratch: torch.Tensor | None


class SwapIn:
    """Copies back and decodes, part by part."""

    def __init__(self, tiers: Tiers, seed: int) -> None:
        """Args: tiers: shared with swap-out; seed: of stochastic rounding."""
        self._tiers = tiers
        self._seed = seed

    def fetch(self, handle: Handle, role: Role) -> Event:
        """Bring a handle, now in state FETCHING, back; the event of its decode.

        Raises:
            MemoryError: no memory to decode into; the handle is as it was stored.
        """
        device = self._tiers.device
        staged: list[_Staged] = []
        try:
            out, result = self._allocate(handle)
            for part in handle.parts:
                staged += (self._bring(handle, part),)
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError for both
            for one in staged:
                self._give_back_after(one)
            with self._tiers.lock:
                handle.to(State.STORED)
            raise MemoryError(f"swap-in of {handle.raw_nbytes} bytes: {error}") from None
        self._tiers.counters.hold(device=handle.raw_nbytes)
        if len(staged) == 1 and not handle.gathered:
            part, only = handle.parts[0], staged[0]
            event = self._decode(part, only, out, role)
        else:
            event = self._decode_all(handle, staged, out, result, role)
        with self._tiers.lock:
            if handle.state is State.FETCHING:
                handle.event, handle.result = event, result

        def fetched() -> None:
            if len(staged) == 1 and not handle.gathered:
                self._decoded(handle, part, only, event)
            self._fetched(handle, event)

        device.when(event, fetched)
        return event

    def round_trip(self, handle: Handle, source: torch.Tensor) -> torch.Tensor:
        """The values that the handle's codec gives back, of a handle that has kept its memory.

        Raises:
            MemoryError: no memory to encode or decode into.
        """
        out, result = self._allocate(handle)
        x = flatten(source) if handle.gathered else source
        for part in handle.parts:
            codec, mine = part.codec, part.of(x)
            bound = checked_bound(codec, mine.dtype, mine.numel())
            payload = torch.empty(bound, dtype=torch.uint8, device=mine.device)
            key = encode_key(self._seed, handle, part)
            size = checked_size(
                codec, codec.encode_flat(mine, payload, key=key, stream=None), bound
            )
            codec.decode_flat(payload[:size], part.of(out), stream=None)
        if handle.gathered:
            unflatten_into(out, handle.meta, result)
        handle.remember(result)
        return result

    def _allocate(self, handle: Handle) -> tuple[torch.Tensor, torch.Tensor]:
        # Memory to decode into, [n] flat, and for the result, which is that unless gathered.
        dtype = torch_dtype(handle.meta.dtype)
        out = self._tiers.device.allocate(dtype, handle.raw_nbytes // dtype.itemsize)
        return out, empty_strided(handle.meta, out.device) if handle.gathered else out

    def _bring(self, handle: Handle, part: Part) -> _Staged:
        # The payload where the codec can read it, what to wait for, and scratch to give back.
        device, nbytes, file, host = self._tiers.device, part.nbytes, part.file, part.host
        after: tuple[Event, ...] = ()
        if file is not None and self._tiers.disk is not None:
            disk, target = self._tiers.disk, device.host_memory(max(nbytes, 1))
            after = (device.submit(lambda _: disk.read(file, target[:nbytes]), role="h2d"),)
            host = target
        if host is None:
            raise InternalError("a stored part has neither host memory nor a file")
        if device.unified or part.codec.verbatim:
            return _Staged(host[:nbytes], after, None)
        scratch, source = device.scratch(nbytes), host

        def copy(_stream: Stream) -> None:
            _raise_first(after)
            copy_bytes(scratch, source, nbytes)

        copied = device.submit(copy, role="h2d", after=after)
        if self._tiers.counters.timeline is not None:
            draw = partial(self._tiers.draw, "copy in", "h2d", handle, part, copied, nbytes)
            device.when(copied, draw)
        return _Staged(scratch[:nbytes], (copied,), scratch)

    def _decode(self, part: Part, staged: _Staged, out: torch.Tensor, role: Role) -> Event:
        codec, device, payload = part.codec, self._tiers.device, staged.payload

        def job(stream: Stream) -> None:
            _raise_first(staged.after)  # codecs are not given what the disk has damaged
            if part.checked == "payload" and checksum(payload) != part.checksum:
                raise CorruptEncodingError(DAMAGED.format(codec.name, part.nbytes))
            codec.decode_flat(payload, out, stream=stream)
            if part.checked == "source" and checksum(out) != part.checksum:
                raise CorruptEncodingError(DAMAGED.format(codec.name, part.nbytes))

        if codec.verbatim and not device.unified:  # the copy is all there is to do
            role = "h2d"
        return device.submit(job, role=role, after=(*staged.after, device.now()))

    def _decoded(self, handle: Handle, part: Part, staged: _Staged, event: Event) -> None:
        if not self._tiers.device.unified:
            self._tiers.give_back(staged.scratch)
            self._tiers.note_damage()
        part.decode_s = event.elapsed_s
        track: Role = "h2d" if part.codec.verbatim else "codec"
        self._tiers.draw("decode", track, handle, part, event, part.nbytes)
        self._tiers.counters.decoded(part.codec.name, part.decode_s)

    def _decode_all(
        self,
        handle: Handle,
        staged: list[_Staged],
        out: torch.Tensor,
        result: torch.Tensor,
        role: Role,
    ) -> Event:
        events = []
        for part, one in zip(handle.parts, staged, strict=True):
            event = self._decode(part, one, part.of(out), role)
            self._tiers.device.when(event, partial(self._decoded, handle, part, one, event))
            events.append(event)

        def job(_stream: Stream) -> None:
            _raise_first(events)
            if handle.gathered:
                unflatten_into(out, handle.meta, result)

        return self._tiers.device.submit(job, role=role, after=tuple(events))

    def _give_back_after(self, staged: _Staged) -> None:
        # Its copy may be under way.
        for event in staged.after:
            self._tiers.device.when(event, lambda: self._tiers.give_back(staged.scratch))

    def _fetched(self, handle: Handle, event: Event) -> None:
        with self._tiers.lock:
            released = handle.state is State.RELEASED
            if handle.state is State.FETCHING:
                handle.to(State.READY if event.error is None else State.STORED)
            if event.error is not None or released:
                handle.result = None
            if isinstance(event.error, CorruptEncodingError):
                handle.error = event.error  # what is stored is no use: nothing else is to share it
        if event.error is not None or released:
            self._tiers.counters.hold(device=-handle.raw_nbytes)
        elif handle.unpacked == 0 and handle.advice is not None and handle.advice.learns:
            self._tell(handle, handle.advice)
        if released:
            self._tiers.free(handle)

    def _tell(self, handle: Handle, advice: Advice) -> None:
        # What the codec took for the whole of the handle. A copy over a link is no codec's time.
        codec, parts = handle.parts[0].codec, handle.parts
        if codec.verbatim and not self._tiers.device.unified:
            return
        if all(p.codec is codec and p.encode_s and p.decode_s for p in parts):
            advice.note_round_trip(codec.name, sum(p.encode_s + p.decode_s for p in parts))


def _raise_first(events: Iterable[Event]) -> None:
    for event in events:
        if event.error is not None:
            raise to_raise(event.error)
