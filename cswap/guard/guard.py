"""The accuracy guard: measures, at intervals, the error of one module's gradients.

The error is caused by saved tensors that are encoded lossily.

Note [how the guard works]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A check takes three training steps. During the first step the guard records which modules save
tensors that are encoded lossily. During the second step it copies one of these modules when the
module is called (module_rerun.py). Tensor hooks copy the gradients of the module's outputs during
backward. When the third step begins, no activation is alive. The guard then runs the module's
forward and backward twice, once with exact and once with lossy saved tensors, and compares the
gradients. On all other steps the guard compares two integers and does nothing else.

The codec of a tensor is chosen by the module that saves the tensor first. So a module with a
large gradient error moves the classes that chose the codecs, not necessarily its own class, to a
milder codec. The guard checks the module again at once, until the error is within the limit or no
lossy codec is left. A class never returns to a harsher codec.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.advisor.lossy_fallback import harshest, lossy_part
from cswap.dynamo import leave_alone
from cswap.engine.saved.eligibility import is_tracing
from cswap.errors import UnsupportedError
from cswap.guard.gradient_check import compare
from cswap.guard.module_rerun import Call, Copy, differentiable
from cswap.hook_stack import are_disabled
from cswap.log import log
from cswap.module_patch import mark

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.utils.hooks import RemovableHandle

    from cswap.engine.engine import SwapEngine
    from cswap.engine.saved.observer import Saved
    from cswap.guard.gradient_check import Verdict

FIRST_CHECK: Final = 2
"""Step of the first check, for every interval: a large error should show early."""

MAX_STEPS_UNTIL_CALL: Final = 1
"""A check waits this many further steps for a module that is not called in the first."""

MAX_STEPS_UNTIL_BACKWARD: Final = 66
"""Steps that a check waits for gradients. A loss may be accumulated over several calls, or a call
may have no backward. The check ends one step later, after 67 steps. 67 is a prime: if a model is
called k times between two backwards, the next check is likely to meet another of the k calls."""


@dataclass(slots=True)
class _Probe:
    """One check in progress. It has hooks on a module, then the call, then the gradients."""

    path: str
    armed_at: int
    handles: list[RemovableHandle] = field(default_factory=list)
    call: Call | None = None
    saved: list[Saved] = field(default_factory=list)
    begin: int = 0
    failed: bool = False

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def make_guard(model: torch.nn.Module, engine: SwapEngine) -> Guard | None:
    """A guard for a model; None if no lossy codec is admitted or ``guard_every`` is 0."""
    if not engine.advisor.may_use_lossy or not engine.config.guard_every:
        return None
    return Guard(model, engine)


class Guard:
    """Checks one leaf module of a model every ``guard_every`` steps. See the Note."""

    def __init__(self, model: torch.nn.Module, engine: SwapEngine) -> None:
        """Args: model: the model to check; engine: the engine that swaps its saved tensors."""
        config = engine.config
        self._leaves = {
            path: module
            for path, module in model.named_modules()
            if not any(module.children()) and not isinstance(module, torch.jit.ScriptModule)
        }
        self._every, self._limit = config.guard_every, config.guard_error
        self._counters, self._milder = engine.counters, engine.advisor.milder
        self._observer = engine.observer
        self._random = random.Random(config.seed)
        self._turn = threading.Lock()
        self._step = 0
        self._due = FIRST_CHECK
        self._next = FIRST_CHECK - 1
        self._gap = 1
        self._lossy: dict[str, list[str]] = {}
        self._again: str | None = None
        self._asked: Counter[str] = Counter()
        self._probe: _Probe | None = None

    def begin_step(self) -> None:
        """A forward of the model begins. Never raises."""
        if torch.compiler.is_compiling():  # else a new step would be a new graph
            return
        self._step += 1
        if self._step < self._next or is_busy() or not self._turn.acquire(blocking=False):
            return
        try:
            self._advance()
        except Exception as error:  # a fault of the guard must not stop the training
            self._fail("the guard itself", error)
            self.remove()
        finally:
            self._turn.release()

    def remove(self) -> None:
        """Stop for good."""
        self._next = sys.maxsize
        self._observer.seen = None
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.remove()

    # -------------------------------------------------------------- schedule

    def _advance(self) -> None:
        seen, self._observer.seen = self._observer.seen, None
        if seen is not None:
            self._survey(seen)
        probe = self._probe
        if probe is not None:
            if self._waits_for(probe):
                self._next = self._step + 1
                return
            probe.remove()
            self._probe = None
            if probe.call is not None and not probe.call.gradients:
                self._due = self._step + self._every
            self._judge(probe)
        if self._step >= self._due or self._again is not None:
            self._arm()
        elif self._step == self._due - 1:
            self._observer.seen = []
            self._next = self._due
        else:
            self._next = self._due - 1

    def _waits_for(self, probe: _Probe) -> bool:
        waited = self._step - probe.armed_at
        if probe.call is None:
            if probe.failed or waited > MAX_STEPS_UNTIL_CALL:
                return False
            self._observer.seen = []
            return True
        return not probe.call.gradients and waited <= MAX_STEPS_UNTIL_BACKWARD

    def _survey(self, seen: Iterable[Saved]) -> None:
        # The leaf modules whose saved tensors are encoded lossily now, by class.
        found: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for saved in seen:
            if saved.scope in self._leaves and saved.codec() is not None:
                found[type(self._leaves[saved.scope]).__name__][saved.scope] = None
        self._lossy = {kind: list(paths) for kind, paths in found.items()}

    def _arm(self) -> None:
        again, self._again = self._again, None
        path = again if again in self._leaves else self._choose()
        if path is None:  # no lossy tensor was seen: double the interval until the next survey
            self._gap = min(2 * self._gap, self._every)
            self._due = self._step + self._gap
            self._observer.seen = [] if self._gap == 1 else None
            self._next = max(self._due - 1, self._step + 1)
            return
        self._gap = 1
        if self._step >= self._due:
            self._due = (self._step // self._every + 1) * self._every
        module = self._leaves[path]
        self._probe = probe = _Probe(path, self._step)
        probe.handles += [
            module.register_forward_pre_hook(mark(partial(self._enter, probe)), with_kwargs=True),
            module.register_forward_hook(mark(partial(self._leave, probe))),
        ]
        self._observer.seen = []
        self._next = self._step + 1

    def _choose(self) -> str | None:
        # Classes take turns: the class that was checked least often comes first.
        paths = {
            kind: usable
            for kind, known in self._lossy.items()
            if (usable := [path for path in known if path in self._leaves])
        }
        if not paths:
            return None
        kind = min(paths, key=lambda k: self._asked[k])
        self._asked[kind] += 1
        return self._random.choice(paths[kind])

    # --------------------------------------------------- hooks on the module

    @leave_alone
    def _enter(
        self, probe: _Probe, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling() or probe.call is not None or is_busy():
            return
        try:
            call = Call(module, args, kwargs)
        except Exception as error:
            self._give_up(probe, error)
            return
        probe.begin = len(self._observer.seen or ())
        probe.call = call

    @leave_alone
    def _leave(self, probe: _Probe, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or probe.call is None or not probe.handles:
            return
        probe.remove()  # the hooks are for this call only
        seen = self._observer.seen or []
        probe.saved = [s for s in seen[probe.begin :] if s.scope == probe.path]
        try:
            probe.handles += _ask_for_gradients(probe.call, differentiable(output))
        except Exception as error:
            self._give_up(probe, error)

    # ------------------------------------------------------------- judgement

    def _judge(self, probe: _Probe) -> None:
        call, probe.call = probe.call, None
        if call is None or not call.gradients or all(s.codec() is None for s in probe.saved):
            return
        try:
            verdict = compare(call, probe.saved)
        except Exception as error:
            self._give_up(probe, error)
            return
        finally:
            del call
        if verdict is None:
            return
        self._counters.guarded(verdict.error, verdict.cosine)
        names = ", ".join(sorted({codec for _, codec in verdict.codecs}))
        log.debug(
            "guard: %s with %s: relative error %.4g, cosine %.6g",
            probe.path, names, verdict.error, verdict.cosine,
        )  # fmt: skip
        if not verdict.error <= self._limit:
            self._grow_milder(probe.path, verdict)

    def _grow_milder(self, path: str, verdict: Verdict) -> None:
        worst = harshest(lossy_part(codec) for _, codec in verdict.codecs)
        for kind in sorted(k for k, codec in verdict.codecs if lossy_part(codec) == worst):
            if not self._milder.allows(kind, worst):  # encoded before it was forbidden
                continue
            what = f"{kind or 'no module'}: {worst} -> {self._milder.forbid(kind, worst)}"
            self._counters.grow_milder(what)
            log.warning(
                "The gradients of %r are wrong by %.3g (guard_error=%g) with lossy saved tensors; "
                "from here on, %s.",
                path, verdict.error, self._limit, what,
            )  # fmt: skip
        self._again = path

    def _give_up(self, probe: _Probe, error: Exception) -> None:
        self._leaves.pop(probe.path, None)
        probe.remove()
        probe.call, probe.failed = None, True
        self._fail(repr(probe.path), error)

    def _fail(self, what: str, error: Exception) -> None:
        log.debug("guard: %s cannot be checked", what, exc_info=error)
        self._counters.fall_back("guard", f"{what}: {error}", "the guard does not check it")


def is_busy() -> bool:
    """Whether a check would disturb the user's run: no gradients, tracing, counting, or capture.

    Nor are tensors saved by hooks where these are disabled, as inside of `torch.func.grad`.
    """
    if not torch.is_grad_enabled() or is_tracing() or are_disabled():
        return True
    if torch._C._len_torch_dispatch_stack() > 0:  # noqa: SLF001 - something counts operators
        return True
    cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return cuda and torch.cuda.is_current_stream_capturing()


def _ask_for_gradients(
    call: Call, outputs: tuple[torch.Tensor | None, ...]
) -> list[RemovableHandle]:
    # The user's graph may live longer than the check, so the caller removes these hooks.
    wanted = [(i, x) for i, x in enumerate(outputs) if x is not None]
    if not wanted:
        raise UnsupportedError("it returns nothing that can be differentiated")
    handles: list[RemovableHandle] = []
    for index, output in wanted:
        note = partial(_note_gradient, call, index)
        handles.append(output.register_hook(note))  # type: ignore[no-untyped-call]
    return handles


@leave_alone
def _note_gradient(call: Call, index: int, gradient: torch.Tensor) -> None:
    # Runs in backward. The first gradient is enough: a second backward adds nothing to the check.
    if torch.compiler.is_compiling() or index in call.gradients:
        return
    try:
        call.gradients[index] = Copy.of(gradient)
    except Exception as error:
        log.debug("guard: a gradient could not be copied", exc_info=error)
