"""A section of a handle's region: encoded, moved and decoded by itself.

Most handles have one. A large tensor on a device with a link has several, so that while one is
encoded the one before is under way: the whole takes as long as the slower of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import torch

from cswap.codecs.base import DEFAULT_KEY, EncodeKey

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cswap.codecs.base import Codec
    from cswap.devices.base import Event
    from cswap.stores.disk import DiskFile

SECTION_ALIGN: Final = 1 << 16
"""Sections begin at multiples of this many elements: whole tiles of every format."""

MARGIN: Final = 32
"""Of an encoding whose size varies, 1/MARGIN more is reserved in the host's memory."""

SECTION_SALT: Final = 0x9E3779B1
"""Sets the random numbers of a tensor's sections apart (2**32 over the golden ratio)."""

INDICES: Final = frozenset({torch.int16, torch.int32, torch.int64})
"""An operator that is given a wrong index reads memory that is not its own, without a check."""

Checked = Literal["", "source", "payload"]


def with_margin(nbytes: int) -> int:
    """Bytes to reserve for the next encoding of a tensor, if the last one has this size."""
    return nbytes + nbytes // MARGIN


class Section:
    """One section. Written under the executor's lock.

    Attributes:
        index: among the handle's sections.
        start: elements of the region before it.
        numel: elements.
        codec: that encoded it.
        host: the store's buffer; ``nbytes`` of it are in use. None: elsewhere, or not stored yet.
        file: on disk instead.
        writing: the file, while it is being written; the bytes are in ``passing`` until then.
        passing: [nbytes] of host memory, on the way to the disk.
        kept: scratch memory of the device instead: the host had no room for it.
        nbytes: encoded bytes.
        safe: whether the source is not needed any more to have it stored, once ``out`` has fired.
        out: after this event its encoding is where it is to be; None: it is.
        back: after this event the stored copy has been read for the last time; None: it has.
        checksum: CRC-32 of the bytes that ``checked`` names.
        checked: which bytes are compared on the way back; "" for none.
        encode_s: seconds that the encode took; 0.0 if that was not measured.
        decode_s: seconds that the last decode took.
    """

    __slots__ = (
        "back",
        "checked",
        "checksum",
        "codec",
        "decode_s",
        "encode_s",
        "file",
        "host",
        "index",
        "kept",
        "nbytes",
        "numel",
        "out",
        "passing",
        "safe",
        "start",
        "writing",
    )

    def __init__(self, index: int, start: int, numel: int, codec: Codec) -> None:
        self.index = index
        self.start = start
        self.numel = numel
        self.codec = codec
        self.host: torch.Tensor | None = None
        self.file: DiskFile | None = None
        self.writing: Future[DiskFile | None] | None = None
        self.passing: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None
        self.safe = False
        self.nbytes = 0
        self.out: Event | None = None
        self.back: Event | None = None
        self.checksum = 0
        self.checked: Checked = ""
        self.encode_s = 0.0
        self.decode_s = 0.0

    @property
    def placed(self) -> bool:
        """Whether it is known where its encoding is, or is about to be in the device's order."""
        return not (self.host is None and self.file is None and self.kept is None) or (
            self.passing is not None
        )

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """This section of the region's elements x [n]."""
        return x if self.numel == x.numel() else x[self.start : self.start + self.numel]

    def key(self, seed: int, position: int, step: int) -> EncodeKey:
        """Names its encode: the same tensor of the same step is rounded alike."""
        if self.codec.lossless:
            return DEFAULT_KEY
        return EncodeKey(seed, position + self.index * SECTION_SALT, step)


def cut(x: torch.Tensor, codec: Codec, section_bytes: int | None) -> list[Section]:
    """The sections of x [n], each of at most ``section_bytes``; one if that is None."""
    numel = x.numel()
    if section_bytes is None or x.nbytes <= section_bytes:
        return [Section(0, 0, numel, codec)]
    step = max(1, section_bytes // x.element_size() // SECTION_ALIGN) * SECTION_ALIGN
    starts = range(0, numel, step)
    return [Section(i, s, min(step, numel - s), codec) for i, s in enumerate(starts)]
