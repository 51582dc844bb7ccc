"""Swapping where host memory is the device's own, for tensors with a handle: see in_line.py."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cswap.codecs.layout import torch_dtype
from cswap.codecs.registry import get_codec
from cswap.engine.transfer.executor import Executor
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.in_line import InLine, NoRoomError
from cswap.engine.transfer.stored import Stored
from cswap.errors import CorruptEncodingError, InternalError, without_frames

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec
    from cswap.engine.transfer.executor import Memory, WayPlace
    from cswap.engine.transfer.handle import Handle, Owner
    from cswap.engine.transfer.resources import Resources


class HostExecutor(Executor):
    """The executor of a unified device."""

    in_line: InLine

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        super().__init__(resources)
        self.in_line = InLine(resources)

    def swap_out(
        self, token: Owner, x: torch.Tensor, codec: Codec, place: WayPlace | None = None
    ) -> None:
        """See `Executor.swap_out`."""
        handle = token.handle
        while True:
            self._decide(handle, codec, ((0, x.numel(), 0),))
            start_s = time.perf_counter()
            try:
                stored = self.in_line.encode(x, codec, self._key(handle, codec))
                break
            except NoRoomError as full:
                self._keep(handle, *full.args)
                return
            except MemoryError as error:  # raw would want as much
                self._keep(handle, "memory", error)
                return
            except Exception as error:
                if codec.verbatim:
                    self._keep(handle, "raw:encode", error)
                    return
                self._counters.fall_back(f"{codec.name}:encode", error)
                codec = get_codec("raw")
        raw_nbytes, nbytes, encode_s = handle.raw_nbytes, stored.nbytes, stored.encode_s
        with self._lock:  # see Note [interrupts]
            if handle.state is not State.KEPT:  # another thread has let it leave, too
                return
            token.stored = stored
            handle.to(State.STORED)
            handle.let_go()
        self._counters.moves.append(
            (-raw_nbytes, stored.host_bytes, 0, codec.name, raw_nbytes, nbytes, encode_s)
        )
        if handle.advice is not None and handle.advice.learns:
            handle.advice.note_encoded(codec.name, raw_nbytes, nbytes)
        name = "copy out" if codec.verbatim else "encode"
        self._draw(name, handle, stored, start_s, raw_nbytes)

    def _fetch(self, token: Owner, *, expected: bool) -> Memory:
        handle, stored, start_s = token.handle, token.stored, time.perf_counter()
        if not isinstance(stored, Stored):
            raise InternalError("a stored tensor is nowhere")
        dtype = torch_dtype(handle.meta.dtype)
        try:
            numel = handle.raw_nbytes // dtype.itemsize
            out, decode_s = self.in_line.decode(stored, dtype, numel)
        except CorruptEncodingError as error:
            # The stored bytes are no use: nothing else is to share them.
            handle.error = without_frames(CorruptEncodingError(str(error)))
            raise
        codec, advice = stored.codec, handle.advice
        if advice is not None and advice.learns and not token.uses:
            advice.note_round_trip(codec.name, stored.encode_s + decode_s)
        name = "copy in" if codec.verbatim else "decode"
        self._draw(name, handle, stored, start_s, stored.nbytes)
        return self._in_layout(handle, out), False

    def _draw(self, name: str, handle: Handle, stored: Stored, start_s: float, nbytes: int) -> None:
        timeline = self._counters.timeline
        if timeline is not None:
            span_s = start_s, time.perf_counter()
            timeline.job(name, "codec", handle.label, span_s, stored.codec.name, nbytes)
