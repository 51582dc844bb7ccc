"""Tensors that are brought back before their own use, as inputs of others: `Lent`.

Note [inputs are lent]
~~~~~~~~~~~~~~~~~~~~~~
A tensor that is computed again needs its inputs. One that is encoded, or computed again itself, is
brought back for that, and then waits for its own use, which comes a little later (engine/saved/
results.py). So it takes its raw bytes from then on. On a CPU, one that is larger than all that may
wait there is held for the computation alone, and its own inputs have gone by then. Small ones count
nothing: a few of them are lent at a time, and a program of the solver has columns for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cswap.advisor.live_costs import KEEP, REMAT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cswap.fit.saved import Saved, Way


SMALL: Final = 1 / 64
"""Share of the largest tensor's bytes, below which one counts nothing."""


class Asker(NamedTuple):
    """A tensor that needs another one where it is computed again.

    Attributes:
        number: of the tensor.
        lent: number of its own `Lent` at that moment; -1: it is used then.
    """

    number: int
    lent: int


class Lent(NamedTuple):
    """Some moments before a tensor's own use, at which it may be there already.

    Attributes:
        number: of the tensor.
        begin: moment at which another one is used, for which it may be needed.
        end: moment of the next of these, or of its own use.
        before: number of the one that goes on in this one; -1: there is none.
        askers: for whom it is brought back.
    """

    number: int
    begin: int
    end: int
    before: int
    askers: tuple[Asker, ...]


def lent_of(saved: Sequence[Saved], most_depth: int, most_bytes: float) -> tuple[Lent, ...]:
    """Those of a step, each behind those that it refers to.

    Args:
        saved: the step's tensors, in their order.
        most_depth: operators in a row, at most.
        most_bytes: of a tensor that waits after the computation.
    """
    names = {name: i for i, one in enumerate(saved) for name in one.names}
    least = SMALL * max(one.nbytes for one in saved)
    names = {name: i for name, i in names.items() if saved[i].nbytes >= least}
    needs = [[(names[n.name], n.depth) for n in s.needs if n.name in names] for s in saved]
    asked: dict[tuple[int, int], set[int]] = {}  # a chain leads to tensors that were saved before
    for i, one in enumerate(saved):
        for asker, index in _asked_for(saved, needs, i, most_depth, most_bytes):
            asked.setdefault((one.first_use, -index), set()).add(asker)
    numbers = {key: n for n, key in enumerate(sorted(asked))}
    ends, befores = {}, {}
    latest: dict[int, tuple[int, int]] = {}
    for key in numbers:
        moment, index = key[0], -key[1]
        ends[key], befores[key] = moment + 1, -1
        if saved[index].nbytes <= most_bytes:
            ends[key] = saved[index].first_use
            if index in latest:
                ends[latest[index]], befores[key] = moment, numbers[latest[index]]
        latest[index] = key
    return tuple(
        Lent(
            -key[1],
            key[0],
            ends[key],
            befores[key],
            tuple(Asker(i, numbers.get((key[0], -i), -1)) for i in sorted(asked[key])),
        )
        for key in numbers
    )


def _asked_for(
    saved: Sequence[Saved],
    needs: Sequence[Sequence[tuple[int, int]]],
    first: int,
    most_depth: int,
    most_bytes: float,
) -> Iterator[tuple[int, int]]:
    # Pairs of a tensor and an input of it, on the chains to the first one.
    moment, ways = saved[first].first_use, [(first, 0)] * saved[first].recomputable
    seen = set(ways)
    while ways:
        asker, depth = ways.pop()
        for index, more in needs[asker]:
            below, one = (index, depth + more), saved[index]
            if one.first_use <= moment:
                continue
            yield asker, index
            runs = one.recomputable and below[1] + one.depth <= most_depth
            if runs and one.nbytes <= most_bytes and below not in seen:
                seen.add(below)
                ways.append(below)


def are_there(lent: Sequence[Lent], ways: Mapping[int, Way]) -> list[bool]:
    """Whether each of them is there. Args: lent: of a step; ways: of its tensors, by index."""
    found: list[bool] = []
    for one in lent:
        is_there = one.before >= 0 and found[one.before]
        if not is_there and ways[one.number].action != KEEP:
            is_there = any(
                ways[asker.number].action == REMAT and (asker.lent < 0 or found[asker.lent])
                for asker in one.askers
            )
        found.append(is_there)
    return found
