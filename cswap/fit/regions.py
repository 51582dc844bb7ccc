"""Modules that are recomputed as a whole: which of them may be, how long they take, and doing it.

Note [a second forward]
~~~~~~~~~~~~~~~~~~~~~~~
torch's checkpointing runs a module's forward again in backward, with the random state and the
autocast state of the first time. So the gradients keep their bits, as long as the forward does
nothing else than to compute. Batch norms that keep running statistics would count a batch twice:
in the second forward they have copies of these, which changes no output. A module with any other
buffer that its forward writes is never recomputed. Nor is a module in whose forward a collective
runs: ranks plan for themselves, and a second collective of one rank alone would block all.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.utils.checkpoint import checkpoint

from cswap import hook_stack
from cswap.fit.problem import Region, is_within
from cswap.fit.used_bytes import UsedBytes, storage_of
from cswap.module_patch import ModulePatch, mark
from cswap.ranks import are_several, collectives_so_far
from cswap.selectors import Selectors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from cswap.config import SwapConfig
    from cswap.fit.goal_chooser import GoalChooser
    from cswap.fit.seen import SeenTensor
    from cswap.stats.counters import Counters

_NORMS: Final = (BatchNorm1d, BatchNorm2d, BatchNorm3d)

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
        self._versions = {n: b._version for n, b in model.named_buffers()}  # noqa: SLF001
        self._calls: dict[str, _Calls] = {}
        self._patches: list[ModulePatch] = []
        for path, module in model.named_modules():
            if not path or path in excluded or not _may_run_twice(module):
                continue
            calls = self._calls[path] = _Calls()
            patch = ModulePatch(module)
            self._patches.append(patch)
            patch.pre_hook(partial(self._enter, calls), prepend=True)
            patch.hook(partial(self._leave, calls))

    def begin_step(self) -> None:
        """Count calls from zero again."""
        for calls in self._calls.values():
            calls.in_step = 0

    def found(self) -> tuple[Region, ...]:
        """The modules that may be recomputed, by the steps measured so far."""
        written = {
            name
            for name, buffer in self._model.named_buffers()
            if self._versions.get(name) != buffer._version  # noqa: SLF001
        }
        found = [
            Region(path, calls.shortest_s + CHECKPOINT_S, calls.bytes_besides(path))
            for path, calls in self._calls.items()
            if calls.most_in_step == 1 and calls.alone and not self._writes(path, written)
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
                self._model.get_submodule(owner), _NORMS
            ):
                return True
        return False

    def _enter(self, calls: _Calls, _module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and not is_compiling():
            calls.in_step += 1
            calls.most_in_step = max(calls.most_in_step, calls.in_step)
            calls.collectives = _collectives()
            calls.began_s = _now(args) - self._chooser.step.hooks_s

    def _leave(
        self, calls: _Calls, _module: torch.nn.Module, args: tuple[Any, ...], _out: Any
    ) -> None:
        if torch.is_grad_enabled() and not is_compiling():
            took_s = _now(args) - self._chooser.step.hooks_s - calls.began_s
            calls.shortest_s = min(calls.shortest_s, took_s)
            now = _collectives()
            calls.alone = calls.alone and now is not None and now == calls.collectives
            calls.inputs = [
                (x.nbytes, self._chooser.saved_at(storage.data_ptr()))
                for x in args
                if (storage := storage_of(x)) is not None
            ]


class _Calls:
    """The calls of one module.

    Attributes:
        alone: no collective of several ranks was started meanwhile (ranks.py says why).
        collectives: that had been started when the last call began; None: not known.
    """

    def __init__(self) -> None:
        self.in_step = self.most_in_step = 0
        self.alone = True
        self.collectives: int | None = 0
        self.began_s, self.shortest_s = 0.0, float("inf")
        self.inputs: list[tuple[int, SeenTensor | None]] = []

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
    return own and not scripted and not together


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
    if not torch.is_grad_enabled() or is_compiling():
        return plain(*args, **kwargs)
    calls = 0

    def run(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return plain(*args, **kwargs)
        outside = (*module.parameters(), *module.buffers())
        with _copied_statistics(module), _counted(used, outside):
            return plain(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False)


@contextmanager
def _copied_statistics(module: torch.nn.Module) -> Iterator[None]:
    # See Note [a second forward].
    own = [(m, dict(m._buffers)) for m in module.modules() if isinstance(m, _NORMS) and m.training]  # noqa: SLF001
    try:
        for norm, buffers in own:
            for name, buffer in buffers.items():
                norm._buffers[name] = None if buffer is None else buffer.clone()  # noqa: SLF001
        yield
    finally:
        for norm, buffers in own:
            norm._buffers.update(buffers)  # noqa: SLF001


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
