"""`Passage`: a tensor with a handle that is on the host, or on its way there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cswap.engine.link.link_way import Region
    from cswap.engine.link.trip import Trip


class Passage:
    """See `RegionOwner`. The handle's token owns it, so it goes with the last packed view.

    Attributes:
        checksum: of the bytes that are compared on the way back; None: none are.
    """

    __slots__ = ("__weakref__", "checksum", "nbytes", "position", "region", "trip")

    def __init__(self, region: Region, nbytes: int, position: int, trip: Trip | None) -> None:
        """See `RegionOwner`."""
        self.region, self.nbytes, self.position, self.trip = region, nbytes, position, trip
        self.checksum: int | None = None
