"""The saved tensors of a step, the ways to hold them, and a plan's word for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from cswap.advisor.live_costs import REMAT

if TYPE_CHECKING:
    import torch

    from cswap.fit.link_rates import LinkRates

GROWTH: Final = 1.25
"""Size of a tensor, over the planned one, up to which a plan holds for it."""


class Key(NamedTuple):
    """Name of a tensor's save: it is the same in the next step, whatever the size of its batch.

    Attributes:
        scope: path of the module that saves it.
        dtype: of the tensor.
        nth: among the saves of this dtype in that module, in a step.
    """

    scope: str
    dtype: torch.dtype
    nth: int


class Way(NamedTuple):
    """A way to hold a saved tensor.

    Attributes:
        action: "keep", "remat", or the name of a codec.
        held_bytes: of device memory.
        added_s: seconds that it adds to a step.
        in_step: whether these were measured in a step; else in a trial, or by a calibration.
        link_bytes: that go over the link, out and back.
        host_s: seconds of the host, where it is ahead of the device; on a CPU, part of ``added_s``.
        passing_bytes: of device memory that its encoding passes through, with others.
    """

    action: str
    held_bytes: int
    added_s: float
    in_step: bool = False
    link_bytes: int = 0
    host_s: float = 0.0
    passing_bytes: int = 0

    def alone_s(self, link: LinkRates | None) -> float:
        """Seconds if nothing else is done meanwhile."""
        if link is None:
            return self.added_s
        return self.added_s + self.link_bytes * (1 / link.out + 1 / link.back)


class Need(NamedTuple):
    """A save from which a tensor is computed again.

    Attributes:
        name: of the save.
        depth: number of operators in a row from it to the tensor.
    """

    name: Key
    depth: int


@dataclass(frozen=True, slots=True)
class Saved:
    """One saved tensor of a step.

    Attributes:
        names: of its saves, in their order: several modules may save the same memory.
        nbytes: its raw bytes.
        ways: to hold it; "keep" is one of them.
        born: moment of its save.
        first_use: moment of its first use in backward.
        last: moment of its last use, or the last at which the operator still holds it.
        needs: the saves from which it is computed again, if it can be.
        left: last moment at which forward itself holds its memory; 0: that of its save.
        depth: number of operators in a row that compute it again, if its inputs are there.
        product: whether a matrix product or a convolution is one of these.
        part_of: number of the storage of which it is a part, in the step; 0: it is the whole of
            one. Parts stay all or leave all: a storage is there as long as one of its parts.
    """

    names: tuple[Key, ...]
    nbytes: int
    ways: tuple[Way, ...]
    born: int
    first_use: int
    last: int
    needs: tuple[Need, ...] = ()
    left: int = 0
    depth: int = 1
    product: bool = False
    part_of: int = 0

    @property
    def recomputable(self) -> bool:
        """Whether it can be computed again."""
        return any(way.action == REMAT for way in self.ways)

    def of_size(self, nbytes: int) -> Saved:
        """The tensor with so many raw bytes: its ways take bytes and seconds in proportion."""
        factor = nbytes / max(1, self.nbytes)
        ways = (
            way._replace(
                held_bytes=int(factor * way.held_bytes),
                added_s=factor * way.added_s,
                link_bytes=int(factor * way.link_bytes),
                passing_bytes=int(factor * way.passing_bytes),
            )
            for way in self.ways
        )
        return replace(self, nbytes=nbytes, ways=tuple(ways)) if factor != 1 else self


class Decided(NamedTuple):
    """A plan's word for one tensor.

    Attributes:
        action: "keep", "remat", or the name of a codec.
        number: of the tensor.
        nbytes: its raw bytes.
    """

    action: str
    number: int
    nbytes: int

    def allows(self, nbytes: int) -> bool:
        """Whether the plan holds for a tensor of so many bytes."""
        return nbytes <= GROWTH * self.nbytes
