"""`Ahead`: tensors that come back over a link before backward asks for them.

See Note [a way is issued once] in link.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.engine.link.backward_order import BackwardOrder
from cswap.stats.counters import NO_TENSOR

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.engine.link.link_way import LinkWay, Region
    from cswap.engine.link.sources import Sources
    from cswap.engine.link.spill import Spill
    from cswap.engine.link.way_back import WayBack
    from cswap.engine.transfer.resources import Resources


class Ahead:
    """Of one link. Used under its lock.

    Attributes:
        order: in which backward is expected to ask.
        guessed: regions that have been begun for the first tensors of a backward.
        nbytes: of tensors that are ahead.
        most_bytes: that they may have.
        furthest: number of tensors that may come before one, at most, when its way back begins.
    """

    def __init__(self, resources: Resources, sources: Sources, back: WayBack, spill: Spill) -> None:
        """Args: resources: of the device; the others: of the link."""
        self._device, self._counters = resources.over_link, resources.counters
        self._sources, self._back, self._spill = sources, back, spill
        self.order = BackwardOrder()
        self.guessed: list[Region] = []
        self.nbytes = self.most_bytes = self.furthest = 0

    def begin_step(self, alive: Iterable[Region]) -> None:
        """A step begins: let go of the tensors for which no backward has asked."""
        self.guessed.clear()
        for region in alive:
            if region.ahead:
                self.drop(region)

    def start_first(self, alive: list[Region]) -> None:
        """Begin the first ways back of a backward that has asked for no tensor that is away.

        Where tensors of several steps are away, nobody knows which of them are asked for.

        Args:
            alive: regions whose tensor may be asked for, the oldest first.
        """
        steps = {region.step for region in alive if region.owner() is not None}
        if len(steps) != 1:
            return
        for n, way in enumerate(self.order.expected(alive)):
            region = way.region
            if region is None or (region.n_unsized and not region.serves):
                break  # the host would wait
            if n > way.ahead or not way.from_start:
                break
            if not self._brings(way, *steps):
                break
            self.guessed.append(region)

    def check_guess(self, first: Region) -> None:
        """Backward asks for its first tensor that is away.

        Of another order, those that have been begun for it leave no room for the others.
        """
        guessed, self.guessed = self.guessed, []
        if guessed[0] is not first:
            for region in guessed:
                if region.ahead:
                    self.drop(region)

    def go_on(self, turn: int, step: int) -> None:
        """Begin the way back of the tensors after this turn, while there is room.

        Args:
            turn: in the order, of the tensor that is asked for.
            step: of that tensor.
        """
        order, n = self.order.ways, self.order.next
        last, waiting = min(turn + self.furthest, len(order) - 1), None
        while n <= last:
            way = order[n]
            if n - turn > way.ahead:
                waiting = n if waiting is None else waiting
                n += 1
                continue
            if not self._brings(way, step):
                break
            n += 1
        self.order.next = n if waiting is None else waiting

    def _brings(self, way: LinkWay, step: int) -> bool:
        # Begin the way back of a way's tensor, if one is away; whether there was room.
        region = way.region
        if region is not None and region.step != step:
            region = way.region_of(step)
        owner = None if region is None else region.owner()  # held: it is not released meanwhile
        if region is None or owner is None or region.asked or region.ahead:
            return True
        nbytes, lane = way.nbytes, way.lane
        if self.nbytes + self._sources.asked_bytes // 2 + nbytes > self.most_bytes:
            return False
        if region.source is None or not region.serves:
            if not self._device.has_room(nbytes) or (
                region.once and not self._spill.is_read(region)
            ):
                return False
            if lane.step_bytes is not None and not lane.fits_plan(nbytes):
                return False
            try:
                self._back.start(region)
            except BaseException as error:
                self._device.drain()  # a stream may be writing memory that nobody holds now
                if not isinstance(error, Exception):
                    raise
                if isinstance(error, MemoryError):
                    self._counters.fall_back("prefetch", error)
                return False  # unpack will try again, and raises if it must
            region.held_bytes += nbytes
            self._counters.moves.append((nbytes, 0, *NO_TENSOR))
        region.wanted = region.ahead = True
        self.nbytes += nbytes
        return True

    def drop(self, region: Region) -> None:
        """Let go of a tensor that is ahead; it comes back once more if it is asked for."""
        nbytes = region.way.nbytes
        region.ahead = region.wanted = False
        self.nbytes -= nbytes
        if region.memory is not None:
            region.home.wait_event(region.ready)
            region.memory = None
            region.held_bytes -= nbytes
            self._counters.moves.append((-nbytes, 0, *NO_TENSOR))
