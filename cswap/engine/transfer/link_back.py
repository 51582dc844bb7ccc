"""The way back over a link: copy from the host, decode on the device.

See Note [the host is ahead] in link_executor.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cswap.codecs.layout import copy_bytes, unflatten_into
from cswap.engine.transfer.resources import DAMAGED, Patience, checksum
from cswap.errors import CorruptEncodingError, InternalError, to_raise

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Stream
    from cswap.devices.base import Event, Role
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.resources import Resources
    from cswap.engine.transfer.section import Section


class LinkBack:
    """Copies and decodes sections in the order of the device."""

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        self._resources, self._disk = resources, resources.files
        self._device, self._counters = resources.over_link, resources.counters

    def bring(
        self,
        handle: Handle,
        out: torch.Tensor,
        result: torch.Tensor,
        role: Role,
        issued: Event,
    ) -> Event:
        """Submit the copies and decodes of a stored handle.

        Args:
            handle: stored.
            out: [n] flat memory of the compute stream, for the decoded region.
            result: ``out``, or the strided tensor if the handle is gathered.
            role: of the decodes: "compute", or "codec" if they are ahead of their use.
            issued: the moment on the compute stream at which ``out`` was allocated.

        Returns:
            An event after which ``result`` holds the values. Computation has to join it, unless
            the role is "compute" and the codec is not raw.

        Raises:
            CorruptEncodingError: a file is gone or damaged, or a codec refused the payload.
            MemoryError: no scratch memory.
        """
        events = [
            self._bring_section(handle, section, section.of(out), role, issued)
            for section in handle.sections
        ]
        if len(events) == 1 and not handle.gathered:
            return events[0]

        def gather(_stream: Stream) -> None:
            for event in events:
                if event.error is not None:
                    raise to_raise(event.error)
            if handle.gathered:
                unflatten_into(out, handle.meta, result)

        return self._device.submit(gather, role=role, after=tuple(events))

    def _bring_section(
        self, handle: Handle, section: Section, out: torch.Tensor, role: Role, issued: Event
    ) -> Event:
        self._await_place(handle, section)
        before = () if section.out is None else (section.out,)
        if section.codec.verbatim:
            return self._copy_raw(handle, section, out, (*before, issued))
        scratch, payload, ready = self._stage(handle, section, before)
        device = self._device
        decoded = device.submit(
            partial(self._decode, section, payload, out),
            role=role,
            after=(*ready, issued),
            measure=section.encode_s > 0,
        )
        if scratch is not None:
            device.give_back(scratch, decoded)
        elif section.back is None:
            section.back = decoded
        else:  # of another stream, perhaps, which it comes before or after
            section.back = device.submit(
                lambda _: None, role="codec", after=(section.back, decoded)
            )
        self._note(handle, section, decoded, "codec")
        return decoded

    def _copy_raw(
        self, handle: Handle, section: Section, out: torch.Tensor, after: tuple[Event, ...]
    ) -> Event:
        host, device = self._host_copy(section), self._device

        def copy(_stream: Stream) -> None:
            copy_bytes(out, host, out.nbytes)
            if checksum(out) != section.checksum:
                raise CorruptEncodingError(DAMAGED.format("raw", section.nbytes))

        if section.checked:
            section.back = copied = device.submit(copy, role="h2d", after=after)
        else:
            section.back = copied = device.copy(out, host, out.nbytes, role="h2d", after=after)
        if section.host is None:  # read from a file
            device.hold(host, copied)
        self._note(handle, section, copied, "h2d")
        return copied

    def _stage(
        self, handle: Handle, section: Section, before: tuple[Event, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor, tuple[Event, ...]]:
        # Scratch to be given back, the payload where the codec reads it, events to wait for.
        nbytes = section.nbytes
        if section.kept is not None:
            return None, section.kept[:nbytes], before
        host = self._host_copy(section)
        scratch = self._device.scratch(max(nbytes, 1), "h2d")
        copied = self._device.copy(scratch, host, nbytes, role="h2d", after=before)
        section.back = copied
        if section.host is None:  # read from a file
            self._device.hold(host, copied)
        if copied.error is not None:
            self._device.give_back(scratch, copied)
            raise to_raise(copied.error)
        if self._counters.timeline is not None:
            self._device.when(
                copied,
                lambda: self._resources.draw(
                    "copy in", "h2d", handle, section, copied.span_s, nbytes
                ),
            )
        return scratch, scratch[:nbytes], (copied,)

    def _await_place(self, handle: Handle, section: Section) -> None:
        # Its copy has not been issued: the host does not know yet how much to copy.
        patience = Patience()
        while not section.placed:
            if handle.error is not None:
                raise to_raise(handle.error)
            if section.out is None:
                raise InternalError("a stored section is nowhere")
            self._device.wait(section.out)
            self._device.pump()
            patience.pause(handle.state.value)

    def _host_copy(self, section: Section) -> torch.Tensor:
        with self._resources.lock:
            found = section.host if section.host is not None else section.passing
            file = section.file
        if found is not None:
            return found
        if file is None or self._disk is None:
            raise InternalError("a stored section has neither host memory nor a file")
        return self._disk.take(file)

    def _decode(
        self, section: Section, payload: torch.Tensor, out: torch.Tensor, stream: Stream
    ) -> None:
        codec = section.codec
        if section.checked == "payload" and checksum(payload) != section.checksum:
            raise CorruptEncodingError(DAMAGED.format(codec.name, section.nbytes))
        codec.decode_flat(payload, out, stream=stream)
        if section.checked == "source" and checksum(out) != section.checksum:
            raise CorruptEncodingError(DAMAGED.format(codec.name, section.nbytes))

    def _note(self, handle: Handle, section: Section, event: Event, role: Role) -> None:
        if event.measured or self._counters.timeline is not None:
            self._device.when(event, partial(self._decoded, handle, section, event, role))

    def _decoded(self, handle: Handle, section: Section, event: Event, role: Role) -> None:
        section.decode_s = event.elapsed_s
        self._resources.draw("decode", role, handle, section, event.span_s, section.nbytes)
        self._counters.decoded(section.codec.name, section.decode_s)
        self._resources.tell(handle)

    def read_ahead(self, handle: Handle) -> bool:
        """Begin to read the handle's files; whether all of them are in memory by now."""
        files = [s.file for s in handle.sections if s.file is not None]
        return not files or (self._disk is not None and self._disk.read_ahead(files))
