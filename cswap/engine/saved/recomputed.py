"""`Recomputed`: a saved tensor that is computed again, without a handle.

Note [saved again without a handle]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An activation such as relu saves its result, and the next operator saves the same tensor as its
input. The second one gets a `Recomputed` of its own, with the layout of its view, which refers to
the first. Backward asks for both, one soon after the other, so the first keeps the memory that was
computed until all of them have asked.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from cswap.engine.saved.modified import modified_error
from cswap.engine.transfer.handle import version_counter

if TYPE_CHECKING:
    import torch

    from cswap.engine.transfer.device_lanes import Lane
    from cswap.remat.record import Remat


class SharedUse:
    """Other users of the memory of a saved tensor that is computed again (see short_way.py).

    Attributes:
        seen: one of them needs the tensor's handle.
        again: another place saves the same tensor once more.
        last: the object that autograd got for the last such tensor, if that has no handle and
            ``again`` is set.
    """

    __slots__ = ("again", "last", "seen")

    def __init__(self) -> None:
        self.seen = self.again = False
        self.last: weakref.ref[Recomputed] | None = None


class Recomputed:
    """One saved tensor that is computed again, with the dtype of its memory. It holds no bytes.

    Attributes:
        remat: how it is computed.
        lane: of its device.
        shared_use: of its place in the step.
        position: index of this tensor among those saved in its step.
        step: number of that step.
        nbytes: of the tensor's memory.
        lossy_ok: whether its inputs may be lossy.
        version: at which the tensor was saved.
        first: of those that were saved of this tensor; None: this one. All below is the first's.
        users: how many there are.
        uses: how often they were asked for.
        result: memory that was computed, for those that have not asked yet.
        took_s: seconds in the hooks so far.
        base: of which the tensor is a view, or the tensor itself, if it is expected to be saved
            again.
    """

    __slots__ = (
        "__weakref__",
        "_counter",
        "_offset",
        "_sizes",
        "_strides",
        "base",
        "first",
        "lane",
        "lossy_ok",
        "nbytes",
        "position",
        "remat",
        "result",
        "shared_use",
        "step",
        "took_s",
        "users",
        "uses",
        "version",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        remat: Remat,
        lane: Lane,
        shared_use: SharedUse,
        *,
        lossy_ok: bool,
    ) -> None:
        """See the attributes. Args: tensor: as autograd saves it."""
        self.remat = remat
        self.lane = lane
        self.shared_use = shared_use
        self.lossy_ok = lossy_ok
        self.nbytes = remat.formula.nbytes
        self.position = self.step = self.uses = 0
        self.users = 1
        self.first: Recomputed | None = None
        self.result: torch.Tensor | None = None
        self.took_s = 0.0
        self.base: weakref.ref[torch.Tensor] | None = None
        self._sizes = tensor.shape
        self._strides = tensor.stride()
        self._offset = int(tensor.storage_offset())
        self.version = tensor._version  # noqa: SLF001
        self._counter = version_counter(tensor)

    def expect_others(self, tensor: torch.Tensor) -> None:
        """The same tensor will be saved again. Args: tensor: as autograd saves it now."""
        base = tensor._base  # noqa: SLF001
        self.base = weakref.ref(tensor if base is None else base)
        self.shared_use.last = weakref.ref(self)

    def check(self) -> None:
        """See Note [modified in place] in packed.py.

        Raises:
            RuntimeError: autograd's own: the tensor was modified in place since it was saved.
        """
        if self._counter._version != self.version:  # noqa: SLF001
            raise modified_error(self._counter, self._sizes, self.version)

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """The saved tensor in its memory, which was computed again."""
        if (
            memory.shape == self._sizes
            and memory.stride() == self._strides
            and memory.storage_offset() == self._offset
        ):
            return memory
        return memory.as_strided(self._sizes, self._strides, self._offset)
