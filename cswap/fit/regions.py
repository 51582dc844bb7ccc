"""Modules that are recomputed as a whole: which of them may be, how long they take, and doing it.

Note [modules that run once]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A second forward (Note [a second forward] in second_forward.py) gives the bits of the first one only
if it does nothing else than to compute. So a module is never recomputed

* whose forward writes a buffer, or puts another one in its place, but for the statistics of batch
  norms;
* in whose forward a collective runs: ranks plan for themselves, and a second collective of one rank
  alone would block all;
* that draws random numbers of Python's or NumPy's, or has a generator of its own: torch restores
  the states of its default generators only;
* that disables hooks, as `torch.func.grad` does: torch's checkpointing has its own on the stack;
* whose inputs are modified in place before the step ends, by itself or by others: it would be given
  other values. torch raises then.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

from cswap import hook_stack
from cswap.dynamo import leave_alone
from cswap.engine.saved.eligibility import is_wrapped
from cswap.engine.transfer.handle import version_counter
from cswap.fit.problem import Region, is_within
from cswap.fit.used_bytes import UsedBytes, storage_of
from cswap.module_patch import ModulePatch, mark
from cswap.ranks import are_several, collectives_so_far
from cswap.second_forward import NORMS, checkpointed, tensors_of
from cswap.selectors import Selectors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from contextlib import AbstractContextManager

    from cswap.config import SwapConfig
    from cswap.fit.goal_chooser import GoalChooser
    from cswap.fit.seen import SeenTensor
    from cswap.stats.counters import Counters

CHECKPOINT_S: Final = 2e-4
"""Time of torch's checkpointing itself, per module: assumed, not measured."""

MOST_REGIONS: Final = 256
"""Modules that a plan chooses from: those that were called first."""


class RegionTimer:
    """Measures the forwards of the modules that may be recomputed, until `remove`."""

    def __init__(
        self, model: torch.nn.Module, excluded: Collection[str], chooser: GoalChooser
    ) -> None:
        """Begin with the next forward. Modules within a compiled graph are not measured.

        Args:
            model: its submodules.
            excluded: paths of those that may not.
            chooser: knows the tensors of the step, and the time in the engine: no forward's.
        """
        self._chooser = chooser
        self._model = model
        self._buffers = {n: (b, _version(b)) for n, b in model.named_buffers()}
        self._calls: dict[str, _Calls] = {}
        self._patches: list[ModulePatch] = []
        for path, module in model.named_modules():
            if not path or path in excluded or not _may_run_twice(module):
                continue
            calls = self._calls[path] = _Calls()
            patch = ModulePatch(module)
            self._patches.append(patch)
            patch.pre_hook(partial(self._enter, calls), prepend=True, with_kwargs=True)
            patch.hook(partial(self._leave, calls), with_kwargs=True)

    def begin_step(self) -> None:
        """Count calls from zero again."""
        for calls in self._calls.values():
            calls.in_step = 0
            calls.end_step()

    def found(self) -> tuple[Region, ...]:
        """The modules that may be recomputed, by the steps measured so far."""
        written = {
            name
            for name, buffer in self._model.named_buffers()
            if not _is_same(self._buffers.get(name), buffer)
        }
        for calls in self._calls.values():
            calls.end_step()
        found = [
            Region(path, calls.shortest_s + CHECKPOINT_S, calls.bytes_besides(path))
            for path, calls in self._calls.items()
            if calls.may_run_twice and not self._writes(path, written)
        ]
        return tuple(found[:MOST_REGIONS])

    def remove(self) -> None:
        """Take the hooks off."""
        for patch in self._patches:
            patch.remove()
        self._patches.clear()

    def _writes(self, path: str, written: set[str]) -> bool:
        # Whether its forward writes buffers, other than a batch norm's statistics.
        for name in written:
            owner = name.rpartition(".")[0]
            if (owner + ".").startswith(path + ".") and not isinstance(
                self._model.get_submodule(owner), NORMS
            ):
                return True
        return False

    @leave_alone
    def _enter(
        self,
        calls: _Calls,
        _module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if torch.is_grad_enabled() and not is_compiling() and not hook_stack.are_disabled():
            calls.in_step += 1
            calls.most_in_step = max(calls.most_in_step, calls.in_step)
            calls.collectives = _collectives()
            calls.watch(tensors_of((args, kwargs)))
            calls.random_state = _random_state()
            calls.times_disabled = hook_stack.times_disabled()
            calls.began_s = _now(args) - self._chooser.step.hooks_s

    @leave_alone
    def _leave(
        self,
        calls: _Calls,
        _module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        _out: Any,
    ) -> None:
        if torch.is_grad_enabled() and not is_compiling() and not hook_stack.are_disabled():
            took_s = _now(args) - self._chooser.step.hooks_s - calls.began_s
            calls.shortest_s = min(calls.shortest_s, took_s)
            now = _collectives()
            calls.alone = calls.alone and now is not None and now == calls.collectives
            calls.draws = calls.draws or _random_state() != calls.random_state
            calls.disables = calls.disables or hook_stack.times_disabled() != calls.times_disabled
            calls.inputs = [
                (x.nbytes, self._chooser.saved_at(storage.data_ptr()))
                for x in tensors_of((args, kwargs))
                if (storage := storage_of(x)) is not None
            ]


class _Calls:
    """The calls of one module.

    Attributes:
        alone: no collective of several ranks was started meanwhile (ranks.py says why).
        collectives: that had been started when the last call began; None: not known.
        draws: random numbers that torch's checkpointing does not draw again.
        random_state: of Python and NumPy when the last call began.
        disables: hooks, as `torch.func.grad` does; torch's checkpointing has its own on the stack.
        times_disabled: how often that had happened when the last call began.
        modified: an input was modified in place before its step ended.
    """

    def __init__(self) -> None:
        self.in_step = self.most_in_step = 0
        self.alone = True
        self.draws = self.disables = self.modified = False
        self.random_state: object = None
        self.times_disabled = 0
        self._watched: list[tuple[torch.Tensor, int]] = []
        self.collectives: int | None = 0
        self.began_s, self.shortest_s = 0.0, float("inf")
        self.inputs: list[tuple[int, SeenTensor | None]] = []

    @property
    def may_run_twice(self) -> bool:
        """Whether nothing speaks against it, as far as its calls show."""
        once = self.most_in_step == 1
        return once and self.alone and not self.draws and not self.disables and not self.modified

    def watch(self, inputs: list[torch.Tensor]) -> None:
        """Note the versions of a call's inputs, without holding their memory."""
        self.end_step()
        self._watched = [
            (version_counter(x), x._version)  # noqa: SLF001
            for x in inputs
            if type(x) is torch.Tensor and x.layout is torch.strided and not _is_odd(x)
        ]

    def end_step(self) -> None:
        """Backward has run: whether inputs were modified until then."""
        moved = any(counter._version != version for counter, version in self._watched)  # noqa: SLF001
        self.modified = self.modified or moved
        self._watched = []

    def bytes_besides(self, path: str) -> int:
        """Bytes of the last call's inputs that no module outside of this path saves."""
        return sum(
            nbytes
            for nbytes, seen in self.inputs
            if seen is None or all(is_within(name.scope, path) for name in seen.names)
        )


def _now(args: tuple[Any, ...]) -> float:
    # A GPU runs behind the host: it is waited for, in the few steps that are measured.
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in args):
        torch.cuda.synchronize()
    return time.perf_counter()


def _collectives() -> int | None:
    return collectives_so_far() if are_several() else 0


def _may_run_twice(module: torch.nn.Module) -> bool:
    # A leaf saves little more than its inputs, which would be held instead.
    own = any(True for _ in module.children())
    scripted = any(isinstance(m, torch.jit.ScriptModule) for m in module.modules())
    together = any(isinstance(m, torch.nn.SyncBatchNorm) for m in module.modules())
    draws = any(isinstance(x, torch.Generator) for m in module.modules() for x in vars(m).values())
    return own and not scripted and not together and not draws


def _is_odd(x: torch.Tensor) -> bool:
    # Whether a tensor has no version of its own, or no memory of one piece.
    return is_wrapped(x) or x.is_inference() or x.is_nested


def _random_state() -> object:
    # Of generators that torch's checkpointing does not know.
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - what programs use
    return random.getstate(), kind, np.asarray(keys).tobytes(), tuple(rest)


def _version(buffer: torch.Tensor) -> int | None:
    return None if is_lazy(buffer) or buffer.is_inference() else buffer._version  # noqa: SLF001


def _is_same(before: tuple[torch.Tensor, int | None] | None, now: torch.Tensor) -> bool:
    return before is not None and before[0] is now and before[1] == _version(now)


class Regions:
    """Recomputes modules of a model; which ones may change between two steps.

    Attributes:
        used: counts the tensors that second forwards save.
    """

    def __init__(self, model: torch.nn.Module, counters: Counters) -> None:
        """Args: model: whose submodules; counters: of the engine."""
        self._model, self.used = model, UsedBytes(counters)
        self._patches: dict[str, ModulePatch] = {}

    @property
    def paths(self) -> frozenset[str]:
        """Of the modules that are recomputed."""
        return frozenset(self._patches)

    def recompute(self, paths: Iterable[str]) -> bool:
        """Recompute these modules and no others; whether that is a change."""
        wanted = frozenset(paths)
        if wanted == self.paths:
            return False
        for path in self.paths - wanted:
            self._patches.pop(path).remove()
        for path in sorted(wanted - self.paths):
            module = self._model.get_submodule(path)
            patch = self._patches[path] = ModulePatch(module)
            patch.set("forward", mark(partial(_forward, module.forward, module, self.used)))
        return True


def _forward(
    plain: Callable[..., Any],
    module: torch.nn.Module,
    used: UsedBytes,
    *args: Any,
    **kwargs: Any,
) -> Any:
    def around() -> AbstractContextManager[None]:
        return _counted(used, (*module.parameters(), *module.buffers()))

    return checkpointed(plain, module, around, *args, **kwargs)


@contextmanager
def _counted(used: UsedBytes, outside: Iterable[Any]) -> Iterator[None]:
    # Tensors that a second forward saves are held by torch: counted for as long as they are there.
    below = hook_stack.top(False)
    if below is None:
        yield
        return
    plain = (torch.Tensor, torch.nn.Parameter)
    known = {x.untyped_storage().data_ptr() for x in outside if type(x) in plain}
    pack_below, unpack_below = below

    def pack(x: torch.Tensor) -> Any:
        storage = storage_of(x)
        if storage is not None and storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            used.add(storage)
        return pack_below(x)

    with saved_tensors_hooks(pack, unpack_below):
        yield


def not_to_recompute(model: torch.nn.Module, config: SwapConfig) -> set[str]:
    """Paths of modules that are excluded, that hold one that is, or that are not included."""
    exclude, include = Selectors(config.exclude), Selectors(config.include)
    excluded: set[str] = set()
    included: set[str] = set()
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if exclude.matches(path, module) or (path and parent in excluded):
            excluded.add(path)
        if not include or include.matches(path, module) or (path and parent in included):
            included.add(path)
    found = {path for path, _ in model.named_modules() if path not in included} | excluded
    for path in excluded:
        names = path.split(".")
        found |= {".".join(names[:n]) for n in range(1, len(names))}
    return found
