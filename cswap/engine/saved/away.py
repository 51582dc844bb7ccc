"""`Away`: a saved tensor that is on the host, or on its way there, by its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.saved.without_handle import WithoutHandle

if TYPE_CHECKING:
    from cswap.engine.link.link import Link
    from cswap.engine.link.link_way import Region


class Away(WithoutHandle):
    """One saved tensor, whose storage is at its slot's region.

    Attributes:
        link: that brings it out and back.
        region: that holds it, as long as this object lives.
        aligned: whether the storage began at an address at which new memory may begin.
        trip: see `RegionOwner`: none is told.
    """

    __slots__ = ("aligned", "link", "region")
    depth = 0
    over_link = True
    trip = None

    link: Link
    region: Region
    aligned: bool
