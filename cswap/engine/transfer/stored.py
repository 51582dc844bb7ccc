"""`Stored`: an encoding of a tensor, where host memory is the device's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.codecs.base import Codec
    from cswap.pool import Loan
    from cswap.stores.disk import DiskFile

INDICES: Final = frozenset({torch.int16, torch.int32, torch.int64})
"""An operator that is given a wrong index reads memory that is not its own, without a check."""

Checked = Literal["", "source", "payload"]

Held: TypeAlias = "list[tuple[Loan | None, DiskFile | None]]"
"""The memory of an encoding, or its file: once, so that whoever frees it takes it out first."""

Free: TypeAlias = "Callable[[Held], None]"
"""Frees the memory of an encoding, or its file. Twice is once."""


class Stored:
    """Owned by the object that autograd holds for the tensor, or by its token.

    Attributes:
        codec: that encoded it.
        loan: the store's memory; ``nbytes`` of it are in use. None: it is in a file.
        file: on disk instead.
        nbytes: encoded bytes.
        checksum: CRC-32 of the bytes that ``checked`` names.
        checked: which bytes are compared on the way back; "" for none.
        encode_s: seconds that the encode took.
    """

    __slots__ = (
        "__weakref__",
        "checked",
        "checksum",
        "codec",
        "encode_s",
        "file",
        "loan",
        "nbytes",
    )

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.loan: Loan | None = None
        self.file: DiskFile | None = None
        self.nbytes = self.checksum = 0
        self.checked: Checked = ""
        self.encode_s = 0.0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold it."""
        return 0 if self.loan is None else self.loan.known.size
