"""Following a plan: which of its decisions a saved tensor is, and whether the step is still its.

Note [finding a tensor in the plan]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Tensors are saved in the plan's order, so the next one expected is the next one that comes, of the
size that the plan says. Where modules are recomputed, the tensors that they save are not
seen; but what they hand on may be, when a later module saves it again. So that many tensors more
than expected are no drift: the advisor decides about them. Anything else is another model, another
batch, or another order. Then the plan is worth nothing, and the engine goes on without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.schema.plan import Decision, Plan

AS_EARLY: Final = 16
"""How far ahead a swap-in starts if the plan lets it start as early as memory allows."""


class Planned(NamedTuple):
    """The part of a plan for one saved tensor.

    Attributes:
        decision: of the plan.
        ahead: saved tensors that may come before it in backward when its swap-in starts.
        swaps_ahead: those of them that are swapped, if backward asks for the newest first.
        from_start: whether these are all that are asked for before it.
    """

    decision: Decision
    ahead: int
    swaps_ahead: int
    from_start: bool


class PlanFollower:
    """A plan's decisions in the order in which a step asks for them.

    Attributes:
        depth: how many tensors ahead of backward swap-ins may start at most.
        drift: why the plan is no longer followed; "" while it is.
        follows: whether there is a plan that says anything.
    """

    def __init__(self, plan: Plan | None, unseen: Iterable[int] = ()) -> None:
        """Args: plan: to follow; unseen: positions that modules recompute: autograd keeps none."""
        decisions = {} if plan is None else plan.decisions
        hidden = set(unseen)
        self._planned = _with_distances(dict(decisions))
        self._expected = sorted(p for p in decisions if p not in hidden)
        self._spare = len(hidden)
        self._exact = any(d.nbytes is not None for d in decisions.values())
        self._next = self._extra = self._position = 0
        self._before: dict[int, tuple[int, int]] = {}
        swaps = [p.ahead for p in self._planned.values() if p.decision.action == "swap"]
        self.depth = max(swaps, default=0)
        self.drift = ""
        self.follows = bool(decisions)

    def begin_step(self) -> None:
        """Expect the first tensor again."""
        self._next = self._extra = self._position = 0

    def find(self, position: int, module: str, nbytes: int) -> Planned | None:
        """The plan for the tensor that is being saved.

        Args:
            position: of the tensor among those saved in the step. Slots may have taken those since
                the last call, as in the steps before.
            module: path of the module that saves it.
            nbytes: of its region.
        """
        if self.drift or not self._exact:
            return self._planned.get(position)
        if position == self._position:
            self._before[position] = self._next, self._extra
        else:
            self._next, self._extra = self._before.get(position, (self._next, self._extra))
        self._position = position + 1
        if self._next < len(self._expected):
            planned = self._planned[self._expected[self._next]]
            if planned.decision.nbytes in (None, nbytes):
                self._next += 1
                return planned
        self._extra += 1
        if self._extra > self._spare:
            self.drift = (
                f"tensor {position} of the step, {nbytes} bytes saved in {module or '-'!r}, is not "
                "what the plan expects"
            )
            self._planned.clear()
            self.follows, self.depth = False, 0
        return None


def _with_distances(decisions: dict[int, Decision]) -> dict[int, Planned]:
    positions = sorted(decisions)
    swaps_before = [0]  # number of swapped tensors among the first n
    for position in positions:
        swaps_before.append(swaps_before[-1] + (decisions[position].action == "swap"))
    found = {}
    for n, position in enumerate(positions):
        decision = decisions[position]
        ahead = AS_EARLY if decision.prefetch is None else decision.prefetch
        later = min(len(positions), n + 1 + ahead)
        swaps_ahead = swaps_before[later] - swaps_before[n + 1]
        found[position] = Planned(decision, ahead, swaps_ahead, later == len(positions))
    return found
