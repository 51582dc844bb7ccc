"""`install` and `swapping`: from a user's line to an engine with its hooks on."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.engine.scope import Scope
from cswap.errors import ConfigError
from cswap.hooks import ModuleHooks, SavedTensorHooks
from cswap.recompute import Recomputed, modules_to_recompute
from cswap.schema.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

    from cswap.engine.stats import Stats

_log = logging.getLogger("cswap")


class InstallHandle:
    """What `install` returns: the engine, its stats, and the way to take it off again."""

    def __init__(
        self,
        engine: SwapEngine,
        hooks: SavedTensorHooks,
        model: ModuleHooks | None,
        recomputed: Recomputed | None = None,
    ):
        self.engine = engine
        self._hooks = hooks
        self._model = model
        self._recomputed = recomputed
        self._removed = False

    @property
    def stats(self) -> Stats:
        """What has been done so far."""
        return self.engine.stats

    def remove(self) -> None:
        """Stop swapping. Graphs made before keep working. Calling it again does nothing."""
        if self._removed:
            return
        self._removed = True
        if self._recomputed is not None:
            self._recomputed.remove()
        if self._model is not None:
            self._model.remove()
        else:
            self._hooks.withdraw()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def install(
    model: torch.nn.Module | None = None, *, config: SwapConfig | None = None, **options: Any
) -> InstallHandle:
    """Swap what autograd saves, from now on.

    Args:
        model: swap everything saved while this model runs forward, in any thread. Default:
            everything saved by this thread (and the backward threads that it starts), loss
            functions included.
        config: options made beforehand.
        **options: see `SwapConfig`; over ``config``, over ``CSWAP_<OPTION>`` in the environment.

    Returns:
        A handle with ``stats``, ``engine`` and ``remove()``; also a context manager.

    Raises:
        ConfigError: a wrong option; nothing has been installed then.

    >>> import cswap, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
    >>> with cswap.install(model, min_bytes=0, codec="zvc", workers=0) as handle:
    ...     model(torch.randn(32, 64)).sum().backward()
    >>> handle.stats.swapped > 0
    True
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model={type(model).__name__}: must be a torch.nn.Module, or None for everything."
        )
    engine, recompute = _engine(config, options, model)
    hooks = SavedTensorHooks(engine)
    if model is None:
        hooks.__enter__()
        return InstallHandle(engine, hooks, None)
    scope_of = _ScopeRules(engine.config)
    module_hooks = ModuleHooks(model, engine, hooks, scope_of)
    recomputed = Recomputed(model, recompute) if recompute else None
    return InstallHandle(engine, hooks, module_hooks, recomputed)


@contextmanager
def swapping(*, config: SwapConfig | None = None, **options: Any) -> Iterator[SwapEngine]:
    """Swap what this thread's autograd saves inside the ``with``.

    Backward may run inside or after it.

    Args:
        config: options made beforehand.
        **options: see `SwapConfig`.

    Yields:
        The engine: ``engine.stats``, ``engine.explain()``.

    Raises:
        ConfigError: a wrong option.
    """
    engine, _ = _engine(config, options, None)
    with SavedTensorHooks(engine):
        yield engine


def _engine(
    config: SwapConfig | None, options: dict[str, Any], model: torch.nn.Module | None
) -> tuple[SwapEngine, tuple[str, ...]]:
    # The engine, and the paths of the modules that its plan recomputes.
    if config is not None and not isinstance(config, SwapConfig):
        raise ConfigError(f"config={config!r}: must be a SwapConfig.")
    resolved = SwapConfig.resolve(config, **options)
    plan = None if resolved.plan is None else Plan.parse(resolved.plan)
    if plan is not None and plan.order:
        _log.warning("plan.order: the model's own order of operators is run instead.")
    recompute = modules_to_recompute(plan, model) if plan and model else {}
    unseen = {position for positions in recompute.values() for position in positions}
    return SwapEngine(resolved, plan, unseen=unseen), tuple(recompute)


class _ScopeRules:
    """What the options say about a module; to be asked about parents before children."""

    def __init__(self, config: SwapConfig) -> None:
        self._exclude = config.exclude
        self._include = config.include
        codec = config.codec if isinstance(config.codec, dict) else {}
        self._globs = {k: v for k, v in codec.items() if isinstance(k, str)}
        self._excluded: set[str] = set()
        self._included: set[str] = set()

    def __call__(self, path: str, module: torch.nn.Module) -> Scope:
        kind = type(module).__name__
        parent = path.rpartition(".")[0] if path else None
        if parent in self._excluded or _matches(self._exclude, path, module):
            self._excluded.add(path)
        if not self._include or parent in self._included or _matches(self._include, path, module):
            self._included.add(path)
        kept = path in self._excluded or path not in self._included
        codec = next((v for k, v in self._globs.items() if fnmatchcase(path, k)), None)
        return Scope(path, kind, keep="excluded" if kept else None, codec=codec)


def _matches(selectors: tuple[Any, ...], path: str, module: torch.nn.Module) -> bool:
    return any(
        isinstance(module, s) if isinstance(s, type) else fnmatchcase(path, s) for s in selectors
    )
