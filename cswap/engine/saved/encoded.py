"""`Encoded`: a saved tensor that was encoded where it was saved, without a handle.

Note [modified where nobody looks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Such an encoding was complete before autograd went on, so it holds the values of the save whatever
happens to the tensor later. Autograd's error for a tensor that was modified in place is raised as
long as anybody holds the tensor, or the one of which it is a view: its number of versions is read.
Once those are gone, only a tensor that was cut off from them by ``detach()`` can write into the
memory. Autograd, which has the memory only, would have to raise an error. Here the values are
right, and nothing is raised. To count the versions with a tensor of our own would be the dearest
part of a tensor's way (`python -m bench overhead`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.saved.modified import modified_error
from cswap.engine.saved.without_handle import WithoutHandle

if TYPE_CHECKING:
    from cswap.codecs.base import Codec
    from cswap.engine.transfer.in_line import Encoding, InLine
    from cswap.engine.transfer.notes import Notes


class Encoded(WithoutHandle):
    """One saved tensor, which is the whole of its storage, as an encoding in host memory.

    Whoever makes one sets its attributes, and ``base``.

    Attributes:
        codec: that encoded it.
        encoding: of the tensor.
        in_line: that has encoded it, and decodes it.
        aligned: whether the tensor began at an address at which new memory may begin.
        notes: to be told how long the first round trip took; None: nobody asks.
    """

    __slots__ = ("aligned", "codec", "encoding", "in_line", "notes")

    counts = False
    codec: Codec
    encoding: Encoding
    in_line: InLine
    aligned: bool
    notes: Notes | None

    def check(self) -> None:
        """See `WithoutHandle.check`, and Note [modified where nobody looks]."""
        found = None if self.base is None else self.base()
        if found is not None and found._version != self.version:  # noqa: SLF001
            raise modified_error(found, self.recipe.sizes, self.version)

    @property
    def depth(self) -> int:
        """See `WithoutHandle.depth`."""
        return 0
