"""The way out over a link: encode on the device, copy to the host, or on to the disk.

See Note [the host is ahead] in link_executor.py.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from cswap.codecs.base import checked_bound, checked_size
from cswap.codecs.layout import copy_bytes, first_bytes
from cswap.codecs.registry import get_codec
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.resources import checksum
from cswap.engine.transfer.section import with_margin
from cswap.errors import CorruptEncodingError, to_raise, without_frames

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import torch

    from cswap.codecs.base import LateSize, Stream
    from cswap.devices.base import Event
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.leaving import Leaving
    from cswap.engine.transfer.resources import Resources
    from cswap.engine.transfer.section import Section
    from cswap.engine.transfer.unsized import Unsized
    from cswap.stores.disk import DiskFile

MEASURE_EVERY: Final = 8
"""Encodes of a codec between two whose time is measured: that takes two more events."""


class LinkOut:
    """Encodes and copies sections; issues everything, waits for almost nothing."""

    def __init__(
        self,
        resources: Resources,
        leaving: Leaving,
        unsized: Unsized,
        keep: Callable[[Handle, str, object], None],
    ) -> None:
        """Make the way out.

        Args:
            resources: of the device.
            leaving: sources under way.
            unsized: encodes whose size is not known yet.
            keep: called with a handle whose own memory is still there, and is to stay; a reason;
                and why, or None.
        """
        self._resources, self._leaving, self._keep = resources, leaving, keep
        self._disk = resources.files
        self._device, self._lock = resources.over_link, resources.lock
        self._counters = resources.counters
        self._unsized = unsized
        self._encodes: Counter[str] = Counter()

    def send(self, handle: Handle, section: Section, x: torch.Tensor, issued: Event) -> Event:
        """Submit one section of a leaving handle.

        Args:
            handle: the handle.
            section: one of its sections.
            x: the section's elements.
            issued: the moment on the compute stream at which x holds its values.

        Returns:
            An event after which x has been read for the last time.
        """
        if section.codec.verbatim:
            self._copy(handle, section, x, x.nbytes, issued)
            return section.out or issued
        return self._encode(handle, section, x, issued)

    def _encode(self, handle: Handle, section: Section, x: torch.Tensor, issued: Event) -> Event:
        codec, device = section.codec, self._device
        bound = checked_bound(codec, x.dtype, x.numel())
        self._unsized.make_room(bound)
        scratch = device.scratch(bound, "codec")
        key = section.key(self._resources.seed, handle.position, handle.step)
        sizes: list[int | LateSize] = []

        def job(stream: Stream) -> None:
            sizes.append(codec.encode_flat(x, scratch, key=key, stream=stream))
            if section.checked == "source":
                section.checksum = checksum(x)

        self._encodes[codec.name] += 1
        measure = self._encodes[codec.name] % MEASURE_EVERY == 1
        encoded = device.submit(job, role="codec", after=(issued,), measure=measure)
        section.out = encoded
        # Not x: a callback would hold its memory until the host looks.
        known = partial(
            self._size_known, handle, section, x.nbytes, [scratch], sizes, encoded, bound, issued
        )
        if encoded.error is not None or (sizes and isinstance(sizes[0], int)):
            known(x)
        else:
            self._unsized.add(encoded)
            device.when(encoded, known)
        return encoded if section.codec is codec else section.out

    def _size_known(
        self,
        handle: Handle,
        section: Section,
        raw_nbytes: int,
        lent: list[torch.Tensor],
        sizes: list[int | LateSize],
        encoded: Event,
        bound: int,
        issued: Event,
        x: torch.Tensor | None = None,
    ) -> None:
        # lent: the scratch that it was encoded into, of ``bound`` bytes, until that is given back.
        # x: the section's elements; None: later, when the tensor's own memory may have been let go.
        # After an interrupt this comes once more.
        self._unsized.discard(encoded)
        free: Event | None = encoded  # after that the scratch is; None: it holds the encoding
        try:
            nbytes = self._size(section, sizes, encoded, bound)
        except Exception as error:
            self._degrade(handle, section, x, encoded, issued, error)
        else:
            if encoded.measured:
                section.encode_s = encoded.elapsed_s
                if self._counters.timeline is not None:
                    span = encoded.span_s
                    self._resources.draw("encode", "codec", handle, section, span, raw_nbytes)
            if section.placed:
                free = section.out if section.kept is None else None
            elif self._wanted(handle, section):
                free = self._copy(handle, section, lent[0], nbytes, encoded)
        if free is not None and lent:
            self._give_back(lent, free)
        self._leaving.let_go_read()

    def _give_back(self, lent: list[torch.Tensor], free: Event) -> None:
        try:
            self._device.give_back(lent.pop(), free)  # once, whatever comes in between
        except BaseException:
            self._device.drain()
            raise

    @staticmethod
    def _size(section: Section, sizes: list[int | LateSize], encoded: Event, bound: int) -> int:
        if encoded.error is not None:
            raise to_raise(encoded.error)
        return checked_size(section.codec, sizes[0], bound)

    def _wanted(self, handle: Handle, section: Section) -> bool:
        # Whether anybody may ask for it (or does: a fetch waits for its place), and it is of the
        # last attempt to move it.
        moves = handle.state not in (State.KEPT, State.RELEASED)
        return moves and handle.alive and handle.sections[section.index] is section

    def _degrade(
        self,
        handle: Handle,
        section: Section,
        x: torch.Tensor | None,
        after: Event,
        issued: Event,
        error: Exception,
    ) -> None:
        # x: see `_size_known`.
        raw = get_codec("raw")
        if not self._wanted(handle, section):
            return
        if handle.state is not State.LEAVING:  # its own memory is gone
            handle.error = CorruptEncodingError(f"codec {section.codec.name!r}: {error}")
        elif isinstance(error, MemoryError) or section.codec is raw:
            reason = "memory" if isinstance(error, MemoryError) else "raw:encode"
            self._keep(handle, reason, without_frames(error))
        else:
            self._counters.fall_back(f"{section.codec.name}:encode", error)
            section.codec = raw
            own = self._elements_now(handle, section) if x is None else x
            copied = None if own is None else self._copy(handle, section, own, own.nbytes, after)
            if x is None and own is not None and copied is not None:
                # It is let go when it has been encoded, and read longer than that.
                self._leaving.add(handle, own, copied, issued)

    def _elements_now(self, handle: Handle, section: Section) -> torch.Tensor | None:
        # Of a section of a leaving handle; None: its owner has gone, or it is to stay.
        source = handle.source
        if source is None:
            return None
        if handle.gathered:  # another thread's stream would have to gather it
            self._keep(handle, "raw:encode", None)
            return None
        return section.of(handle.elements(source))

    def _copy(
        self, handle: Handle, section: Section, payload: torch.Tensor, nbytes: int, after: Event
    ) -> Event | None:
        # The event after which the payload has been read; None: it is kept. It is the tensor's own
        # memory if raw, else scratch.
        verbatim = section.codec.verbatim  # else a slot may take this memory in the next step
        loan = self._resources.host.take(nbytes if verbatim else with_margin(nbytes))
        if loan is None:
            return self._without_host(handle, section, payload, nbytes, after)
        # Loans of host memory end with events of this device. A cast would be a call.
        waits: tuple[Any, ...] = (after,) if loan.after is None else (after, loan.after)
        try:
            copied = self._submit_copy(section, loan.buffer, payload, nbytes, waits)
            with self._lock:
                # Another thread may have released it, or let it stay, and freed what there was.
                wanted = copied.error is None and self._wanted(handle, section)
                if wanted:
                    section.host, section.nbytes, section.out = loan.buffer, nbytes, copied
                    section.safe = True
        except BaseException:
            self._device.drain()  # the copy may be writing memory that nobody holds from here on
            raise
        if not wanted:
            self._resources.host.give_back(loan.buffer, copied)
            if copied.error is not None:
                self._cannot_copy(handle, section, copied.error)
            return copied
        self._stored(handle, section, loan.buffer.numel())
        self._draw(handle, section, copied, nbytes)
        return copied

    def _cannot_copy(self, handle: Handle, section: Section, error: BaseException) -> None:
        if not self._wanted(handle, section):
            return
        if handle.state is State.LEAVING:
            self._keep(handle, "raw:encode", error)
        else:  # its own memory is gone
            handle.error = CorruptEncodingError(f"codec {section.codec.name!r}: {error}")

    def _submit_copy(
        self,
        section: Section,
        target: torch.Tensor,
        payload: torch.Tensor,
        nbytes: int,
        after: tuple[Event, ...],
    ) -> Event:
        if not section.checked or not (section.codec.verbatim or section.checked == "payload"):
            return self._device.copy(target, payload, nbytes, role="d2h", after=after)
        source = first_bytes(payload, nbytes)

        def copy(_stream: Stream) -> None:
            copy_bytes(target, source, nbytes)
            section.checksum = checksum(source)

        return self._device.submit(copy, role="d2h", after=after)

    def _stored(self, handle: Handle, section: Section, host_bytes: int) -> None:
        raw_nbytes, sections = handle.raw_nbytes, handle.sections
        if len(sections) > 1:
            raw_nbytes = raw_nbytes * section.numel // sum(s.numel for s in sections)
        whole = section is sections[-1]
        encode_s = section.encode_s * MEASURE_EVERY  # of those that were not measured, too
        name = section.codec.name
        self._counters.swapped_out(
            name, raw_nbytes, section.nbytes, encode_s, host=host_bytes, whole=whole
        )
        if whole and handle.advice is not None and handle.advice.learns:
            nbytes = sum(s.nbytes for s in sections)
            handle.advice.note_encoded(name, handle.raw_nbytes, nbytes)

    def _draw(self, handle: Handle, section: Section, copied: Event, nbytes: int) -> None:
        if self._counters.timeline is None:
            return

        def draw() -> None:
            self._resources.draw("copy out", "d2h", handle, section, copied.span_s, nbytes)

        self._device.when(copied, draw)

    # ------------------------------------------------------- no room on the host

    def _without_host(
        self, handle: Handle, section: Section, payload: torch.Tensor, nbytes: int, after: Event
    ) -> Event | None:
        # See `_copy`.
        if self._disk is not None:
            return self._spill(handle, section, payload, nbytes, after)
        return self._keep_encoding(
            handle, section, payload, nbytes, after, "host_limit", "full, and no spill_dir"
        )

    def _keep_encoding(
        self,
        handle: Handle,
        section: Section,
        payload: torch.Tensor,
        nbytes: int,
        after: Event,
        reason: str,
        why: object,
    ) -> Event | None:
        # On the device. See `_copy`.
        if section.codec.verbatim or handle.state is State.LEAVING:
            self._keep(handle, reason, why)
            return after
        # Its own memory is gone, the encoding is still there.
        with self._lock:
            wanted = self._wanted(handle, section)
            if wanted:
                section.kept, section.nbytes, section.out = payload, nbytes, after
        if not wanted:
            return after
        self._counters.fall_back(reason, why, "encodings stay on the device")
        self._counters.hold(device=nbytes)
        self._stored(handle, section, 0)
        return None

    def _spill(
        self, handle: Handle, section: Section, payload: torch.Tensor, nbytes: int, after: Event
    ) -> Event | None:
        try:
            passing = self._device.host_memory(max(nbytes, 1))[:nbytes]
        except MemoryError as error:
            return self._keep_encoding(handle, section, payload, nbytes, after, "disk", error)
        copied = self._submit_copy(section, passing, payload, nbytes, (after,))
        with self._lock:
            section.passing, section.nbytes, section.out = passing, nbytes, copied
        self._device.when(copied, partial(self._write, handle, section, passing))
        return copied

    def _write(self, handle: Handle, section: Section, passing: torch.Tensor) -> None:
        if not self._wanted(handle, section) or self._disk is None:
            section.passing = None
            return
        section.writing = self._disk.write(passing)
        section.writing.add_done_callback(partial(self._written, handle, section))

    def _written(self, handle: Handle, section: Section, future: Future[DiskFile | None]) -> None:
        error = future.exception()
        file = None if error is not None else future.result()
        with self._lock:
            wanted = self._wanted(handle, section)
            if file is not None and wanted:
                section.file, section.passing, section.safe = file, None, True
        if file is None:
            # The bytes stay in host memory, beyond its limit, unless the source is still there.
            self._keep(handle, "disk", error or "spill_limit reached")
        elif wanted:
            self._stored(handle, section, 0)
        elif self._resources.disk is not None:
            self._resources.disk.release(file)
        self._leaving.let_go_read()
