"""Learns where in a model's call all tensors stay: `QuietModules`.

Note [quiet modules]
~~~~~~~~~~~~~~~~~~~~
torch calls Python twice for each tensor that is saved under hooks, also for a parameter. Where all
tensors stay, that is for nothing. So the hooks are taken off torch's stack there, and autograd
holds the tensors as it does without cswap.

A call of the model is cut at its boundaries: where a module begins, and where it ends. In calls
with all hooks on, the tensors between each two boundaries are noted (learner.py). If two such calls
agree, and all of these tensors stay, the stretch is quiet. Quiet stretches in a row make a span:
the hooks go off where the first one begins, and come back where the last one ends (spans.py,
run.py). A stretch in which a tensor is due to be looked at (Note [a tensor that rests] in rest.py)
is not quiet in that step. Models may take turns (the generator of a GAN does), so pairs of calls
learn, at uneven intervals, which grow while nothing changes. A stretch that was not like before
needs more such calls each time.

A tensor that is computed again needs the tensors in the slots of autograd's nodes. In a span these
are no objects of ours, but the tensors themselves: see `Finder`.

The hooks stay on if anything differs that can be seen where a span begins: the place in the step's
sequence of saved tensors (Note [a step goes by position] in recipes.py), the sizes, the dtype and
the need of a gradient of the positional arguments of the module that begins there, or of the result
of the one that ends. Nor do they go off where the model's own arguments are others. All is learned
anew if a module is in another mode, if other parameters need a gradient, or under autocast. What
cannot be seen by this is seen in the next call that learns. Until then a tensor stays that could
have left; no value can be wrong by that.

If somebody's hooks are on top of ours, or below ours, nothing is taken off: the tensors would be
given to those. So no span begins where a module with others inside begins: its own code may put
hooks on top of ours first.
"""

from __future__ import annotations

import threading
import weakref
from itertools import cycle
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap import hook_stack
from cswap.quiet_modules.learner import Learner
from cswap.quiet_modules.run import Run
from cswap.quiet_modules.spans import Spans
from cswap.quiet_modules.stretch import Boundary, facts_of_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cswap.engine.engine import SwapEngine
    from cswap.quiet_modules.run import Pair
    from cswap.quiet_modules.stretch import Arguments

FIRST_LEARNED: Final = 4
"""Calls of the model that learn at first."""

INTERVALS: Final = (14, 19, 16, 23, 11, 17, 21, 13)
"""Calls between the beginnings of two pairs that learn, in turns: see the Note."""

LONGEST: Final = 8
"""Most times an interval, after so many calls that were like those before."""

_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled  # noqa: SLF001


class QuietModules:
    """Learns the quiet stretches of one installed model."""

    def __init__(self, model: torch.nn.Module, engine: SwapEngine) -> None:
        """Args: model: it; engine: swaps for it."""
        self._model, self._engine = weakref.ref(model), engine
        self._begins = Boundary(module_ends=Boundary())  # of the call
        self._spans = Spans(engine.packer)
        self._modules: list[torch.nn.Module] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._settings: object = None
        self._arguments: Arguments = ()  # of the last call that learned
        self._thread: int | None = None
        self._version = -1
        self._n_calls = 0
        self._next = 0  # call that begins to learn
        self._run: Run | None = None  # the last one
        self._intervals, self._times = cycle(INTERVALS), 1

    def run(
        self, pair: Pair, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Run | Learner | None:
        """For the call of the model that begins, in this thread; None: all hooks stay on.

        Args:
            pair: the hooks, before they are pushed.
            args: of the call.
            kwargs: of the call.
        """
        me = threading.get_ident()
        if self._thread is None:
            self._thread = me
        if me != self._thread or not self._engine.may_be_quiet or hook_stack.top(True) is not None:
            return None
        version, settings = self._engine.packer.book.version, self._settings_now()
        if version != self._version or settings != self._settings:
            self._version = version
            self._spans.forget()
            if self._times > 1:  # calls were alike; where settings change in turns, none are
                self._next, self._times = self._n_calls, 1
        before, self._run = self._run, None
        self._spans.lay_out()
        if before is not None and before.changed:
            self._next = self._n_calls
        arguments = facts_of_call(args, kwargs)
        if not self._is_due() and not self._engine.looks:
            if arguments != self._arguments:
                return None
            self._run = Run(self._engine, pair)
            return self._run
        self._arguments = arguments
        return self._learn(pair)

    def _learn(self, pair: Pair) -> Learner:
        model = self._model()
        assert model is not None  # it is being called
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._settings = self._settings_now()
        reports = self._engine.packer.notes.reports
        if reports is not None:
            reports.sees_all = True
        learner = Learner(self._engine, pair)
        learner.at(self._begins, model, ())
        pair.pack_by(learner.pack)
        return learner

    def end(self, run: Run | Learner) -> None:
        """A call of the model has ended well."""
        if isinstance(run, Learner):
            self._spans.learned(run.end())
            self._times = min(self._times + 1, LONGEST) if run.repeats else 1
        else:
            run.end()

    def _is_due(self) -> bool:
        n = self._n_calls
        self._n_calls = n + 1
        if n > self._next + 1:
            self._next += self._times * next(self._intervals)
        return n < FIRST_LEARNED or n >= self._next

    def _settings_now(self) -> object:
        # No stretch's facts would show a change of these.
        return (
            list(map(_requires_grad, self._parameters)),
            list(map(_training, self._modules)),
            _is_any_autocast_enabled(),
        )
