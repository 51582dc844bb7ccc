"""Knows where in a model's call all tensors stay: `QuietModules`.

Note [quiet modules]
~~~~~~~~~~~~~~~~~~~~
torch calls Python twice for each tensor that is saved under hooks, also for a parameter. Where all
tensors stay, that is for nothing. So the hooks are taken off torch's stack there, and autograd
holds the tensors as it does without cswap.

A call of the model is cut at its boundaries: where it begins, and where modules begin and end. In a
look (order/looks.py) and in the call after it all hooks are on, and both note how many tensors have
been saved at each boundary (recording.py). If they agree, later calls take the hooks off between
boundaries where all tensors stay (spans.py): parameters, small tensors, and those of places whose
tensors stay in this step (`Replay.review`). Nothing more is learned.

A tensor that is computed again needs the tensors in the slots of autograd's nodes. In a span these
are no objects of ours, but the tensors themselves: see `Finder`. Where torch does not tell them
from objects of hooks (before 2.11), no hooks are taken off.

All hooks stay on if the sizes, the dtype or the need of a gradient of the model's own arguments are
others, if a module is in another mode, if other parameters need a gradient, or under autocast. What
cannot be seen by this is seen in the next look. Until then a tensor stays that could have left; no
value can be wrong by that.

If somebody's hooks are on top of ours, or below ours, nothing is taken off: the tensors would be
given to those.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap import hook_stack
from cswap.quiet_modules.recording import Recorder, facts_of_call
from cswap.quiet_modules.spans import Run, lay_out
from cswap.recent import Recent
from cswap.remat.reads import CAN_TELL

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from cswap.engine.engine import SwapEngine
    from cswap.quiet_modules.recording import Event, Pair

MOST_KNOWN: Final = 16
"""Kinds of calls that are remembered."""

_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class _Known:
    # A kind of calls: the last one that was recorded, and whether the one before was alike; None:
    # that one is still to come.
    events: list[Event] = field(default_factory=list)
    alike: bool | None = None


class QuietModules:
    """Takes the hooks off in the calls of one installed model, where all tensors stay."""

    def __init__(self, model: torch.nn.Module, engine: SwapEngine) -> None:
        """Args: model: it; engine: swaps for it."""
        self._model, self._engine = weakref.ref(model), engine
        self._known: Recent[Hashable, _Known] = Recent(MOST_KNOWN)
        self._events: list[Event] = []  # by which the boundaries are set
        self._slots: object = None  # the same
        self._modules: list[torch.nn.Module] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._thread: int | None = None

    def run(
        self, pair: Pair, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Run | Recorder | None:
        """For the call of the model that begins, in this thread; None: all hooks stay on.

        Args:
            pair: the hooks, before they are pushed.
            args: of the call.
            kwargs: of the call.
        """
        me, engine = threading.get_ident(), self._engine
        self._thread = self._thread or me
        is_mine = me == self._thread and hook_stack.top(True) is None
        if not (CAN_TELL and is_mine and engine.may_be_quiet):
            return None
        if engine.looks or not self._modules:
            model = self._model()
            assert model is not None  # it is being called
            self._modules, self._parameters = list(model.modules()), list(model.parameters())
        key = (engine.packer.book.version, facts_of_call(args, kwargs), *self._settings())
        if engine.looks:
            self._known[key] = _Known()
        known = self._known.get(key) or _Known()
        if known.alike is None:
            return Recorder(engine, pair, key)
        if not known.alike or not engine.goes_by_slots:
            return None
        self._lay_out(known.events)
        return Run(engine, pair)

    def end(self, recorder: Recorder) -> None:
        """A recorded call of the model has ended well."""
        known, events = self._known.get(recorder.key) or _Known(), recorder.events
        alike = events == known.events if known.events else None
        self._known[recorder.key] = _Known(events, alike)

    def _lay_out(self, events: list[Event]) -> None:
        slots = self._engine.packer.book.slots or ()
        if events is not self._events or slots != self._slots:
            for event in self._events:
                event.boundary.stay()
            lay_out(events, slots)
            self._events, self._slots = events, slots

    def _settings(self) -> tuple[Hashable, ...]:
        return (
            tuple(map(_requires_grad, self._parameters)),
            tuple(map(_training, self._modules)),
            _is_any_autocast_enabled(),
        )
