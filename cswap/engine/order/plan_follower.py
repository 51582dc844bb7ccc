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

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.schema.plan import Decision, Plan

AS_EARLY: Final = 16
"""How far ahead a swap-in starts if the plan lets it start as early as memory allows."""


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
        self._decisions: dict[int, Decision] = dict(decisions)
        self._expected = sorted(p for p in decisions if p not in hidden)
        self._spare = len(hidden)
        self._exact = any(d.nbytes is not None for d in decisions.values())
        self._next = self._extra = 0
        self.depth = max((_ahead(d) for d in decisions.values() if d.action == "swap"), default=0)
        self.drift = ""
        self.follows = bool(decisions)

    def begin_step(self) -> None:
        """Expect the first tensor again."""
        self._next = self._extra = 0

    def find(self, position: int, module: str, nbytes: int) -> int:
        """The plan's position of the tensor that is being saved; another number if it has none.

        Args:
            position: of the tensor among those saved in the step.
            module: path of the module that saves it.
            nbytes: of its region.
        """
        if self.drift or not self._exact:
            return position
        if self._next < len(self._expected):
            expected = self._expected[self._next]
            wanted = self._decisions[expected]
            if wanted.nbytes in (None, nbytes):
                self._next += 1
                return expected
        self._extra += 1
        if self._extra > self._spare:
            self.drift = (
                f"tensor {position} of the step, {nbytes} bytes saved in {module or '-'!r}, is not "
                "what the plan expects"
            )
            self._decisions.clear()
            self.follows = False
        return self._expected[-1] + 1 + self._extra if self._expected else position

    def decision(self, position: int) -> Decision | None:
        """The plan's decision for a position that `find` gave."""
        return self._decisions.get(position)

    def may_start(self, position: int, ahead: int) -> bool:
        """Whether the swap-in of a position may start while so many others come before it."""
        decision = self._decisions.get(position)
        return decision is None or ahead <= _ahead(decision)


def _ahead(decision: Decision) -> int:
    return AS_EARLY if decision.prefetch is None else decision.prefetch
