"""A section of a handle's region: encoded, moved and decoded by itself.

Most handles have one. A large tensor on a device with a link has several, so that while one is
encoded the one before is under way: the whole takes as long as the slower of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from cswap.codecs.base import EncodeKey

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec
    from cswap.engine.handle import Handle
    from cswap.stores.disk import DiskFile

SECTION_ALIGN: Final = 1 << 16
"""Sections begin at multiples of this many elements: whole tiles of every format."""


SECTION_SALT: Final = 0x9E3779B1
"""Sets the random numbers of a tensor's sections apart (2**32 over the golden ratio)."""


class Part:
    """One section. Written under the executor's lock.

    Attributes:
        index: among the handle's parts.
        start: elements of the region before it.
        numel: elements.
        codec: that encoded it.
        host: the store's buffer; ``nbytes`` of it are in use. None: on disk, or not stored yet.
        file: on disk instead.
        nbytes: encoded bytes.
        checksum: CRC-32 of the bytes that ``checked`` names.
        checked: which bytes are compared on the way back: "source" or "payload"; "" for none.
        encode_s: seconds that the encode took.
        decode_s: seconds that the last decode took; 0.0 before that.
        stored: whether host or file hold all of it, and no job writes them any more.
    """

    __slots__ = (
        "checked",
        "checksum",
        "codec",
        "decode_s",
        "encode_s",
        "file",
        "host",
        "index",
        "nbytes",
        "numel",
        "start",
        "stored",
    )

    def __init__(self, index: int, start: int, numel: int, codec: Codec) -> None:
        self.index = index
        self.start = start
        self.numel = numel
        self.codec = codec
        self.host: torch.Tensor | None = None
        self.file: DiskFile | None = None
        self.nbytes = 0
        self.checksum = 0
        self.checked: Literal["", "source", "payload"] = ""
        self.encode_s = 0.0
        self.decode_s = 0.0
        self.stored = False

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """This section of the region's elements x [n]."""
        return x if self.numel == x.numel() else x[self.start : self.start + self.numel]


def cut(x: torch.Tensor, codec: Codec, section_bytes: int | None) -> list[Part]:
    """The parts of x [n]: sections of at most ``section_bytes``, or one."""
    numel = x.numel()
    if section_bytes is None or x.nbytes <= section_bytes:
        return [Part(0, 0, numel, codec)]
    step = max(1, section_bytes // x.element_size() // SECTION_ALIGN) * SECTION_ALIGN
    starts = range(0, numel, step)
    return [Part(i, s, min(step, numel - s), codec) for i, s in enumerate(starts)]


def encode_key(seed: int, handle: Handle, part: Part) -> EncodeKey:
    """Names the encode of a part: the same tensor of the same step is rounded alike."""
    return EncodeKey(seed, handle.position + part.index * SECTION_SALT, handle.step)
