"""A goal's plan as explanations, for `SwapEngine.explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.advisor.call_site import Site
from cswap.advisor.cost import Candidate
from cswap.advisor.site_history import Explanation, Measured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cswap.fit.link_rates import LinkRates
    from cswap.fit.saved import Decided, Key, Way
    from cswap.fit.seen import WayNotes

WHY: Final = "the goal's plan"


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
    return [
        Explanation(
            number,
            Site(key.scope),
            None,
            tuple(
                sorted(
                    (_candidate(way, decided[key].nbytes, link) for way in ways_of(key)),
                    key=lambda candidate: candidate.cost_s,
                )
            ),
            decided[key].action,
            WHY,
            measured=_measured(notes.get((key, decided[key].action)), decided[key].nbytes),
            known_nbytes=decided[key].nbytes,
        )
        for number, key in sorted(firsts.items())
    ]


def _measured(notes: WayNotes | None, raw_nbytes: int) -> tuple[Measured, ...]:
    if notes is None or not notes.nbytes:
        return ()
    return (Measured(notes.codec, raw_nbytes / notes.nbytes, notes.device_s),)


def _candidate(way: Way, raw_nbytes: int, link: LinkRates | None) -> Candidate:
    nbytes = way.link_bytes or way.held_bytes
    ratio = raw_nbytes / nbytes if nbytes else float(raw_nbytes)
    return Candidate(way.action, ratio, way.added_s, way.alone_s(link), nbytes)
