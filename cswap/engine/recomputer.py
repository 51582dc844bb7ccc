"""Saved tensors that are computed again ("remat"): found at pack, priced, computed at unpack.

`cswap.remat` finds which tensors can be computed again, and how. This module decides whether to.

Note [inputs of a chain]
~~~~~~~~~~~~~~~~~~~~~~~~
An input is a packed object: it comes back as it does for its own operator. That operator runs its
backward a little later and asks for it again, so an input that was decoded or computed waits for
that, within the bounds of memory decoded ahead. On a CPU a larger one waits only where that does
not raise the step's peak: when backward begins, everything is held, and an input that waits beside
its own encoding would come on top. A trial, in forward, reads an input in its own memory, and that
goes on leaving. An input serves only tensors that forgive as large an error as it does (Note [three
tolerances] in cswap/codecs/tolerance.py).

Note [products are for goals]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A matrix product or a convolution takes long: whether it is worth its time depends on the other ways
to free as many bytes. A goal compares all ways of all tensors (`cswap.fit`), so it
alone asks for such chains. Compared with checkpointing, a chain computes only that which is needed
to make one tensor again: of a perceptron it is the first product and not the second. Their time is
measured, on a GPU as well, since no rate of memory tells it.

A library of matrix products may add in another order where an input begins at another address. So
an input that may come back in new memory has to begin where new memory may begin.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.codecs.tolerance import COARSE, EXACT, FINE
from cswap.engine.order.step_order import NO_BACKWARD
from cswap.engine.saved.away import Away
from cswap.engine.saved.encoded import Encoded
from cswap.engine.saved.leaves import KeptLeaf, Leaves
from cswap.engine.saved.packed import Kept, KeptParameter, PackedView, Token
from cswap.engine.saved.recomputed import Recomputed
from cswap.engine.saved.without_handle import WithoutHandle
from cswap.engine.trials import Trials
from cswap.remat.finder import Finder
from cswap.remat.reads import CAN_READ, CAN_TELL

if TYPE_CHECKING:
    from cswap.advisor.advisor import Advisor
    from cswap.config import SwapConfig
    from cswap.engine.recipes import Place
    from cswap.engine.saved.eligibility import OwnedStorages
    from cswap.engine.saved.results import Results
    from cswap.engine.transfer.executor import Memory
    from cswap.engine.transfer.handle import Handle
    from cswap.remat.record import Remat
    from cswap.stats.counters import Counters

GOAL_DEPTH: Final = 4
"""Largest number of operators in a row for a goal: a norm, a product and a gated activation."""

LINK_DEPTH: Final = 8
"""The same for a goal over a link: from the argument of a transformer's block over a residual sum
(product, dropout, sum), a norm, its cast and a product to an activation."""

FREED: Final = (
    "a saved tensor is to be computed again, and the memory of an argument has been freed "
    "(untyped_storage().resize_(0)). remat=False stores such tensors."
)

_Parameter = torch.nn.Parameter
_clock = time.perf_counter
_current_backward = torch._C._current_graph_task_id  # noqa: SLF001


def computes_again(config: SwapConfig) -> bool:
    """Whether the options allow that a tensor is not held."""
    # Policies that are compared mean codecs, and a checksum is of bytes that come back.
    return config.remat and config.policy == "auto" and not config.verify and CAN_READ


class Recomputer:
    """Decides for one engine which saved tensors are computed again, and computes them.

    Attributes:
        trials: of chains.
        leaves: parameters whose casts are saved.
        inputs_s: seconds, since somebody set this to 0, in which inputs were brought back. They are
            these tensors' time, not that of the tensor that was asked for. Threads share it without
            a lock: a wrong time does little harm.
    """

    def __init__(
        self, counters: Counters, advisor: Advisor, owned: OwnedStorages, results: Results
    ) -> None:
        """Args: counters, advisor, owned, results: the engine's."""
        self._counters, self._advisor, self._owned = counters, advisor, owned
        self._results = results
        keep, tolerances = _keep if CAN_TELL else None, (EXACT, FINE, COARSE)
        self.leaves = Leaves()
        holds: dict[str, Any] = {"keep": keep, "hold": self.leaves.hold}
        self._finders = tuple(Finder(tolerance=t, **holds) for t in tolerances)
        self._goal_finders, self._link_finders = (
            tuple(Finder(tolerance=t, max_depth=d, products=True, **holds) for t in tolerances)
            for d in (GOAL_DEPTH, LINK_DEPTH)
        )
        self.trials = Trials(counters, lambda remat: self._bring(remat, again=False))
        self.inputs_s = 0.0

    def find(
        self, tensor: torch.Tensor, handle: Handle, place: Place, *, for_goal: bool = False
    ) -> Remat | None:
        """How to compute the tensor that is being packed again; None: it cannot be.

        Args:
            tensor: as autograd gives it to pack.
            handle: of its memory.
            place: where in the step it is saved.
            for_goal: see Note [products are for goals].
        """
        if not handle.whole or handle.gathered or handle.outer is not None:
            place.note(None)
            return None
        over_link = not _is_unified(place)
        finder = self.finder(tolerance=handle.tolerance, for_goal=for_goal, over_link=over_link)
        found = finder.find(tensor, place.formula)
        if found is not None and (
            found.formula.nbytes != handle.raw_nbytes
            or (found.formula.product and not are_aligned(found))
            or (found.formula is not place.formula and not self._has_parameters(found))
        ):
            found = None
        place.note(found)
        return found

    def _has_parameters(self, remat: Remat) -> bool:
        # Whether the parameters among the inputs will be there: FSDP gathers those of a module for
        # its forward alone, and for its backward, which is not that of the tensor's user.
        return not self._owned.known or all(
            packed.tensor in self._owned
            for packed in (*remat.inputs, *remat.constants)
            if isinstance(packed, KeptParameter | KeptLeaf)
        )

    def finder(self, *, tolerance: int, for_goal: bool = False, over_link: bool = False) -> Finder:
        """Of tensors of this tolerance.

        Args:
            tolerance: see Note [three tolerances] in cswap/codecs/tolerance.py.
            for_goal: see Note [products are for goals].
            over_link: whether the tensors' device has a link.
        """
        if not for_goal:
            return self._finders[tolerance]
        return (self._link_finders if over_link else self._goal_finders)[tolerance]

    def is_worth(self, token: Token, *, fresh: bool = False) -> bool:
        """Whether the token's tensor is to be computed again, rather than stored or kept.

        Args:
            token: its ``remat`` says how.
            fresh: whether to time it once more, if it was not worth it: many steps have passed.
        """
        handle, trial = token.handle, self.trials.of(token, again=fresh)
        if trial is None or not trial.agrees or handle.site is None:
            return False
        position, nbytes, kind = handle.position, handle.raw_nbytes, token.lane.device.kind
        return self._advisor.pays_again(handle.site, position, nbytes, trial.seconds, kind)

    def seconds(self, token: Token) -> float | None:
        """Seconds that computing the token's tensor again takes; None: it cannot be."""
        trial = self.trials.of(token)
        return trial.seconds if trial is not None and trial.agrees else None

    def run(self, remat: Remat) -> torch.Tensor:
        """The tensor's memory, computed again, with the layout of `Formula.layout`.

        Raises:
            RuntimeError: autograd's own, if an input was modified in place since it was saved; or
                its memory was freed.
            CorruptEncodingError: an input did not come back as it was stored.
        """
        # Outside of a backward a longer chain is tried, or somebody looks at a node.
        return remat.run(*self._bring(remat, again=_current_backward() != NO_BACKWARD))

    def bring(self, first: Token | WithoutHandle, *, expected: bool = True) -> Memory:
        """The memory of a saved tensor: waiting, its own, decoded or computed again.

        Args:
            first: owner of the memory.
            expected: whether backward asks: see `Link.bring`.

        Raises:
            RuntimeError: autograd's own, if an input was modified in place since it was saved.
            CorruptEncodingError: the encoding, or an input, did not come back as it was stored.
            MemoryError: no memory for it.
        """
        if first.result is not None:
            found = self._results.found(first)
            if found is not None:
                first.lane.executor.check()
                return found, False
        if isinstance(first, Away):  # the link counts for itself
            memory = first.link.bring(first, expected=expected)
            return memory, memory is first.region.source
        if isinstance(first, Token) and not first.handle.recomputed:
            return first.lane.executor.memory(first, expected=expected)
        if isinstance(first, Encoded):
            return first.decode(), False
        remat = first.remat if isinstance(first, Token | Recomputed) else None
        assert remat is not None  # all others refer to one of these
        return self.run(remat), False

    def _bring(self, remat: Remat, *, again: bool) -> tuple[list[torch.Tensor], bool]:
        # The inputs, and whether they have the bits that they had. again: they will be asked for
        # once more.
        inputs, exact = [], True
        for packed in remat.inputs:
            if isinstance(packed, Kept):
                tensor = packed.tensor
                if packed.version >= 0 and tensor._version != packed.version:  # noqa: SLF001
                    packed.unpack()  # which raises
                inputs.append(tensor)
                continue
            start_s, before_s, self.inputs_s = _clock(), self.inputs_s, 0.0
            assert isinstance(packed, PackedView | WithoutHandle)  # or it would have no depth
            owner = packed.owner()
            memory, own = self._input(owner, again=again)
            inputs.append(packed.rebuild(memory, own=own))
            exact = exact and owner.tolerance == EXACT
            took_s = _clock() - start_s
            if again:
                owner.took_s += took_s - self.inputs_s
            self.inputs_s = before_s + took_s
        if not all([x.untyped_storage().nbytes() or not x.numel() for x in inputs]):  # noqa: C419
            raise RuntimeError(FREED)  # an operator would read memory of others
        return inputs, exact

    def _input(self, first: Token | WithoutHandle, *, again: bool) -> Memory:
        # See Note [inputs of a chain].
        memory, own = self.bring(first, expected=again)
        # In forward a trial asks, and outside of a backward somebody looks at a node.
        if again and not own and _current_backward() != NO_BACKWARD and self._may_wait(first):
            self._results.lend(first, memory)
        return memory, own

    def _may_wait(self, first: Token | WithoutHandle) -> bool:
        # See Note [inputs of a chain].
        device, nbytes = first.lane.device, first.nbytes
        return (
            not device.unified
            or nbytes <= device.ready_bytes
            or self._counters.held_bytes + nbytes <= self._counters.held_at_backward
        )


def _is_unified(place: Place) -> bool:
    lane = place.recipe.lane
    return lane is not None and lane.device.unified


def _keep(tensor: torch.Tensor) -> Kept:
    # See `Finder`, and Note [kept tensors are checked and detached].
    base, kept = tensor._base, tensor if tensor.is_leaf else tensor.detach()  # noqa: SLF001
    is_parameter = type(tensor) is _Parameter or (base is not None and isinstance(base, _Parameter))
    return (KeptParameter if is_parameter else Kept)(kept, tensor._version)  # noqa: SLF001


def are_aligned(remat: Remat) -> bool:
    """Whether no input may come back at another kind of address: Note [products are for goals]."""
    return all(map(_is_aligned, remat.inputs))


def _is_aligned(packed: object) -> bool:
    if not isinstance(packed, PackedView | WithoutHandle):
        return True
    owner = packed.token if isinstance(packed, PackedView) else packed.first or packed
    if isinstance(owner, Token):
        return owner.handle.aligned
    return not isinstance(owner, (Encoded, Away)) or owner.aligned
