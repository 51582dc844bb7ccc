"""Knows where in a model's call all tensors stay: `QuietModules`.

Note [quiet modules]
~~~~~~~~~~~~~~~~~~~~
torch calls Python twice for each tensor that is saved under hooks, also for a parameter. Where all
tensors stay, that is for nothing. So the hooks are taken off torch's stack there, and autograd
holds the tensors as it does without cswap.

A call of the model is cut at its boundaries: where modules begin and end. Two calls of a kind are
recorded: all hooks are on, and it is noted which tensors have been saved at each boundary
(recording.py). If they agree, later calls take the hooks off between boundaries where all tensors
stay (spans.py): parameters, small tensors, and those of places whose tensors stay in this step
(`Replay.review`), and are those of the record. After `EVERY` calls, two are recorded again. Over a
link, the hooks stay on where the last tensors are saved: ways back begin when backward does.

A tensor that is computed again needs the tensors in the slots of autograd's nodes. In a span these
are no objects of ours, but the tensors themselves: see `Finder`. Where torch does not tell them
from objects of hooks (before 2.11), no hooks are taken off.

A kind of calls has the sizes, the dtype and the need of a gradient of the model's own arguments,
the modes of its modules, and the parameters that need a gradient. A change of anything else is
seen in the next record. Until then a tensor stays that could have left; no value can be wrong by
that.

If somebody's hooks are on top of ours, or below ours, nothing is taken off: the tensors would be
given to those.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap import hook_stack
from cswap.engine.order.looks import EVERY
from cswap.quiet_modules.recording import Recorder, facts_of_call
from cswap.quiet_modules.spans import Run, lay_out
from cswap.recent import Recent
from cswap.remat.reads import CAN_TELL

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from cswap.engine.engine import SwapEngine
    from cswap.quiet_modules.recording import Pair, Record

MOST_KNOWN: Final = 64
"""Kinds of calls that are remembered."""

_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class _Known:
    # A kind of calls: the number of the first one that was recorded, the last one, and whether both
    # were alike; None: the second is still to come.
    since: int
    record: Record | None = None
    alike: bool | None = None


class QuietModules:
    """Takes the hooks off in the calls of one installed model, where all tensors stay."""

    def __init__(self, model: torch.nn.Module, engine: SwapEngine) -> None:
        """Args: model: it; engine: swaps for it."""
        self._model, self._engine = weakref.ref(model), engine
        self._known: Recent[Hashable, _Known] = Recent(MOST_KNOWN)
        self._record: Record | None = None  # by which the boundaries are set
        self._slots: object = None  # the same
        self._n_calls = 0
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
        if not (CAN_TELL and is_mine and engine.may_be_quiet) or engine.scopes.run is not None:
            return None
        n = self._n_calls
        self._n_calls = n + 1
        if n % EVERY == 0:
            model = self._model()
            assert model is not None  # it is being called
            self._modules, self._parameters = list(model.modules()), list(model.parameters())
        key = (engine.packer.book.version, facts_of_call(args, kwargs), *self._settings())
        known = self._known.get(key)
        if known is None or n >= known.since + EVERY:
            known = self._known[key] = _Known(n)
        if known.alike is None:
            return Recorder(engine, pair, key)
        if not known.alike or known.record is None or not engine.goes_by_slots:
            return None
        self._lay_out(known.record)
        return Run(engine, pair)

    def end(self, recorder: Recorder) -> None:
        """A recorded call of the model has ended well."""
        known, record = self._known.get(recorder.key), recorder.record()
        if known is not None:
            alike = None if known.record is None else record == known.record
            self._known[recorder.key] = _Known(known.since, record, alike)

    def _lay_out(self, record: Record) -> None:
        slots, before = self._engine.packer.book.slots or (), self._record
        if record is not before or slots != self._slots:
            for event in () if before is None else before.events:
                event.boundary.reset()
            lay_out(record, slots, tells=self._engine.begins_with_backward)
            self._record, self._slots = record, slots

    def _settings(self) -> tuple[Hashable, ...]:
        return (
            tuple(map(_requires_grad, self._parameters)),
            tuple(map(_training, self._modules)),
            _is_any_autocast_enabled(),
        )
