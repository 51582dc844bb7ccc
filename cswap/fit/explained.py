"""A goal's plan as explanations, for `SwapEngine.explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.advisor.call_site import Site
from cswap.advisor.cost import Candidate
from cswap.advisor.live_costs import KEEP
from cswap.advisor.site_history import Explanation, Measured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cswap.fit.link_rates import LinkRates
    from cswap.fit.saved import Decided, Key, Way
    from cswap.fit.seen import WayNotes

NO_OTHER: Final = "no way holds fewer bytes"
FREE: Final = "takes no time, and the plan has room"
FASTEST: Final = "the fastest way to hold fewer bytes"
SMALLER: Final = "holds fewer bytes than each faster way"
HIDDEN: Final = "its copies can be hidden"
WHOLE: Final = "best for the plan as a whole"
FROM_FILE: Final = "the schedule says so"

WHYS: Final = (NO_OTHER, FREE, FASTEST, SMALLER, HIDDEN, WHOLE, FROM_FILE)
"""Reasons of a tensor's way: see docs/troubleshooting.md. They have no figures, so that like rows
of blocks are one (report/explain.py)."""


def explained(
    decided: Mapping[Key, Decided],
    ways_of: Callable[[Key], Iterable[Way]],
    notes: Mapping[tuple[Key, str], WayNotes],
    link: LinkRates | None,
) -> list[Explanation]:
    """The decision for each tensor of a plan, in the order of its numbers.

    A candidate's cost is the seconds that the way adds to a step, if nothing hides its copies.

    Args:
        decided: by save; the first of a tensor's saves names it.
        ways_of: the ways to hold the tensor of a save; none where the plan comes from a file.
        notes: that were taken of ways, by save and action.
        link: of the device; None: host memory is device memory.
    """
    firsts: dict[int, Key] = {}
    for key, one in decided.items():
        firsts.setdefault(one.number, key)

    def row(number: int, key: Key) -> Explanation:
        action, nbytes, ways = decided[key].action, decided[key].nbytes, tuple(ways_of(key))
        candidates = (_candidate(way, nbytes, link) for way in ways)
        return Explanation(
            number,
            Site(key.scope),
            None,
            tuple(sorted(candidates, key=lambda candidate: candidate.cost_s)),
            action,
            _why(action, ways, link),
            measured=_measured(notes.get((key, action)), nbytes),
            known_nbytes=nbytes,
        )

    return [row(number, key) for number, key in sorted(firsts.items())]


def _why(action: str, ways: Iterable[Way], link: LinkRates | None) -> str:
    # By the times known today. Under a plan from a file, none may be.
    by_action = {way.action: way for way in ways}
    mine = by_action.get(action)
    if mine is None:
        return FROM_FILE
    smaller = [way for way in by_action.values() if way.held_bytes < by_action[KEEP].held_bytes]
    if action == KEEP:
        return FREE if smaller else NO_OTHER
    faster = [way for way in smaller if way.alone_s(link) < mine.alone_s(link)]
    if mine in smaller and all(mine.held_bytes < way.held_bytes for way in faster):
        return SMALLER if faster else FASTEST
    return HIDDEN if mine.link_bytes else WHOLE


def _measured(notes: WayNotes | None, raw_nbytes: int) -> tuple[Measured, ...]:
    if notes is None or not notes.nbytes:
        return ()
    return (Measured(notes.codec, raw_nbytes / notes.nbytes, notes.device_s),)


def _candidate(way: Way, raw_nbytes: int, link: LinkRates | None) -> Candidate:
    nbytes = way.link_bytes or way.held_bytes
    ratio = raw_nbytes / nbytes if nbytes else float(raw_nbytes)
    return Candidate(way.action, ratio, way.added_s, way.alone_s(link), nbytes)
