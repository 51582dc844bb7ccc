"""`Recomputed`: a saved tensor that is computed again, without a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.saved.packed import modified_error
from cswap.engine.transfer.handle import version_counter

if TYPE_CHECKING:
    import torch

    from cswap.engine.saved.packed import SharedUse
    from cswap.engine.transfer.device_lanes import Lane
    from cswap.remat.record import Remat


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
        took_s: seconds in the hooks so far.
        unpacked: how often it was asked for.
    """

    __slots__ = (
        "__weakref__",
        "_counter",
        "_offset",
        "_sizes",
        "_strides",
        "_version",
        "lane",
        "lossy_ok",
        "nbytes",
        "position",
        "remat",
        "shared_use",
        "step",
        "took_s",
        "unpacked",
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
        self.position = self.step = self.unpacked = 0
        self.took_s = 0.0
        self._sizes = tensor.shape
        self._strides = tensor.stride()
        self._offset = int(tensor.storage_offset())
        self._version = tensor._version  # noqa: SLF001
        self._counter = version_counter(tensor)

    def check(self) -> None:
        """See Note [modified in place] in packed.py.

        Raises:
            RuntimeError: autograd's own: the tensor was modified in place since it was saved.
        """
        if self._counter._version != self._version:  # noqa: SLF001
            raise modified_error(self._counter, self._sizes, self._version)

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """The saved tensor in its memory, which was computed again."""
        if (
            memory.shape == self._sizes
            and memory.stride() == self._strides
            and memory.storage_offset() == self._offset
        ):
            return memory
        return memory.as_strided(self._sizes, self._strides, self._offset)
