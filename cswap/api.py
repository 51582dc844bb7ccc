"""`install` and `swapping`: from a user's line to an engine with its hooks on."""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_compiling

from cswap.advisor.rates import PRICES_S_PER_BYTE
from cswap.config import SwapConfig
from cswap.devices.stopwatch import CudaStopwatch
from cswap.engine.engine import SwapEngine
from cswap.engine.saved.module_stack import Scope
from cswap.engine.saved.operators import EXCLUDED
from cswap.errors import ConfigError
from cswap.fit.controller import FitController
from cswap.fit.goal import Asked
from cswap.fit.schedule import Schedule
from cswap.fit.whole_device import one_device
from cswap.hooks import HookPair, ModuleHooks, Swapping, check_model, installed_on
from cswap.log import log
from cswap.notices import tell_of_options
from cswap.option_types import SwapOptions  # noqa: TC001 - for typing.get_type_hints
from cswap.ranks import are_several, must_agree
from cswap.recompute import Recomputed, modules_named, modules_to_recompute
from cswap.removable import RemovedAtExit
from cswap.schema.plan import Plan
from cswap.selectors import Globs, Selectors, of_modules, of_operators

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from cswap.fit.curve import Curve
    from cswap.fit.goal import Goal
    from cswap.removable import Removable
    from cswap.stats.stats import Stats
elif sys.version_info >= (3, 11):  # below, typing.get_type_hints knows nothing of the options
    from typing import Unpack


class InstallHandle(RemovedAtExit):
    """The result of `install`: the engine, its stats, and the way to take it off again."""

    def __init__(
        self, engine: SwapEngine, installed: Sequence[Removable], fit: FitController | None = None
    ) -> None:
        """A handle of an installation.

        Args:
            engine: of the hooks.
            installed: to be taken off by `remove`, in this order.
            fit: holds the goal, if there is one; among ``installed``.
        """
        self.engine = engine
        self._installed, self._fit = installed, fit

    def __str__(self) -> str:
        """The gain of the last step, the goal, and the reasons if little was saved."""
        stats, goal = self.stats, self.goal
        if goal is not None and goal.phase == "compiling":
            return (
                "cswap: kernels are compiled beside the training, once per machine; until then, "
                "steps run without cswap"
            )
        lines = [f"cswap: {stats.gain()}"]
        if goal is not None:
            lines.append(str(goal))
        if stats.fallbacks:
            lines.append(f"{stats.fallbacks} times a slower path: see stats.fallbacks_by_reason")
        return "\n".join([*lines, *stats.notes()])

    @property
    def stats(self) -> Stats:
        """Statistics of the engine so far."""
        return self.engine.stats

    @property
    def goal(self) -> Goal | None:
        """The memory goal as it stands; None: there is none.

        Without ``fit``, a model has one from its first step on, where no option says what has to
        leave (docs/fit.md).
        """
        return None if self._fit is None else self._fit.goal

    @property
    def schedule(self) -> Schedule | None:
        """The goal's plan, to be saved for the next run; None: there is no plan yet."""
        return None if self._fit is None else self._fit.schedule

    def largest_batch(self) -> float | None:
        """The largest batch that a limit of bytes holds, predicted, in batches of today's size.

        All but parameters, gradients and optimizer state grow with the batch, and each tensor is
        held in its smallest way. That plan is made anew, which takes seconds for a large model.
        None: there is no such limit, or no plan has been made yet.
        """
        return None if self._fit is None else self._fit.largest_batch()

    def curve(self, goals: int = 10) -> Curve:
        """Time over memory at some goals, predicted from the explored steps.

        The planner makes the plan of each goal, in this thread; training goes on as it was. On a
        CPU this takes about a second or less. Over a link it takes as long as so many plans: one to
        three minutes for ten goals of a large model.

        Args:
            goals: number of goals, at even distances in bytes from the step in which everything
                stays to the smallest one.

        Raises:
            ConfigError: there is no goal, or no plan of explored steps yet.

        >>> import cswap, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
        >>> with cswap.install(model) as handle:
        ...     handle.curve()
        Traceback (most recent call last):
        ...
        cswap.errors.ConfigError: curve: there is no goal...
        """
        if self._fit is None:
            raise ConfigError(
                "curve: there is no goal. Remedy: cswap.install(model, fit=...), and train some "
                "steps. A goal by default begins with the first one."
            )
        return self._fit.curve(goals)

    def hold(self, fit: FitController) -> None:
        """Follow a goal from now on."""
        self._fit, self._installed = fit, (fit, *self._installed)

    def remove(self) -> None:
        """Stop swapping. Graphs made before keep working. Calling it again does nothing."""
        for one in self._installed:
            one.remove()
        self.engine.close()


def install(
    model: torch.nn.Module | None = None,
    config: SwapConfig | None = None,
    **options: Unpack[SwapOptions],
) -> InstallHandle:
    """Swap the tensors that autograd saves, from now on.

    Args:
        model: swap everything saved while this model runs forward, in any thread. Default:
            everything saved by this thread (and the backward threads that it starts), loss
            functions included.
        config: options made beforehand.
        **options: see `SwapConfig`; over ``config``, over ``CSWAP_<OPTION>`` in the environment.

    Returns:
        A handle with ``stats``, ``goal``, ``engine`` and ``remove()``; also a context manager.

    Raises:
        ConfigError: a wrong option; nothing has been installed then.
        GoalError: parameters and gradients alone exceed ``fit``; nothing has been installed then.

    >>> import cswap, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
    >>> with cswap.install(model, min_bytes=0, codec="zvc") as handle:
    ...     model(torch.randn(32, 64)).sum().backward()
    >>> handle.stats.swapped > 0
    True
    """
    if model is not None:
        check_model(model)
    return _install_on(model, config, options, "forward")


def install_on(model: torch.nn.Module, config: SwapConfig, entry: str) -> InstallHandle:
    """Swap the tensors that autograd saves while a method of a model runs.

    Args:
        model: as for `install`.
        config: options.
        entry: the method's name; `install` takes "forward".

    Raises:
        ConfigError: as for `install`.
        GoalError: as for `install`.
    """
    check_model(model)
    return _install_on(model, config, {}, entry)


def _install_on(
    model: torch.nn.Module | None, config: SwapConfig | None, options: SwapOptions, entry: str
) -> InstallHandle:
    resolved = _resolved(config, options)
    asked = Asked.of(resolved, has_model=model is not None)
    planned = resolved.schedule
    schedule = None if planned is None else Schedule.read(planned, resolved)
    engine, recompute = _engine(resolved, model)
    if model is None:
        return InstallHandle(engine, (_Everything(engine),))
    fit = None if asked is None else FitController(model, engine, asked, schedule)
    if fit is not None:
        _warn_of_ranks(engine)
    earlier = installed_on(model)
    if earlier is not None:
        log.warning("install: this model was installed before; that is removed.")
        earlier.remove()
    around = nullcontext if fit is None else fit.used.counted
    recomputed = Recomputed(model, recompute, around)
    hooks = ModuleHooks(model, engine, _ScopeRules(engine.config), entry)
    hooks.track(recompute)
    installed = (hooks, recomputed) if fit is None else (fit, hooks, recomputed)
    hooks.handle = handle = InstallHandle(engine, installed, fit)
    if asked is None and (otherwise := Asked.without_fit(resolved)) is not None:
        ours, theirs = weakref.ref(handle), weakref.ref(model)
        engine.at_first_step = lambda: _aim(ours(), theirs(), otherwise, schedule)
    return handle


def _aim(
    handle: InstallHandle | None,
    model: torch.nn.Module | None,
    asked: Asked,
    schedule: Schedule | None,
) -> bool:
    # Now it is known where the model is, if it trains. Returns whether that is decided.
    if handle is None or model is None:
        return True
    if not torch.is_grad_enabled() or is_compiling():
        return False
    device = one_device(model)
    if device is None or device.type not in PRICES_S_PER_BYTE:
        if schedule is not None:
            log.warning("schedule: without fit=, only a model on one device has a goal.")
        return True
    lossy = handle.engine.advisor.may_use_lossy
    if lossy and must_agree(lossy=True):  # no measured time may choose what is rounded
        return True
    if device.type == "cuda" and not CudaStopwatch.is_on():
        return False
    try:
        handle.hold(FitController(model, handle.engine, asked, schedule))
    except Exception as error:
        log.warning("No goal by default (%s): no plan limits the time of a step.", error)
    return True


def _warn_of_ranks(engine: SwapEngine) -> None:
    if engine.advisor.may_use_lossy and are_several():
        log.warning(
            "A goal with lossy codecs on several ranks: each rank plans by its own times, so ranks "
            "that hold equal tensors may round them differently. With tensor parallelism, leave "
            "one of the two out."
        )


class _Everything:
    """An engine's hooks on the thread that made this, until `remove`."""

    def __init__(self, engine: SwapEngine) -> None:
        self._pair = HookPair(engine)
        try:
            self._pair.push()
        except BaseException:
            self._pair.withdraw()
            raise

    def remove(self) -> None:
        self._pair.withdraw()


def swapping(*, config: SwapConfig | None = None, **options: Unpack[SwapOptions]) -> Swapping:
    """Swap the tensors that this thread's autograd saves inside the ``with``.

    Backward may run inside or after it.

    Args:
        config: options made beforehand.
        **options: see `SwapConfig`.

    Returns:
        A context manager; the ``with`` gives the engine: ``engine.stats``, ``engine.explain()``.

    Raises:
        ConfigError: a wrong option.
    """
    resolved = _resolved(config, options)
    Asked.of(resolved, has_model=False)  # refuses goals
    engine, _ = _engine(resolved, None)
    return Swapping(engine)


def _resolved(config: SwapConfig | None, options: SwapOptions) -> SwapConfig:
    if config is not None and not isinstance(config, SwapConfig):
        raise ConfigError(f"config={config!r}: must be a SwapConfig.")
    return SwapConfig.resolve(config, **options)


def _engine(
    resolved: SwapConfig, model: torch.nn.Module | None
) -> tuple[SwapEngine, tuple[str, ...]]:
    # The engine, and the paths of the modules that are recomputed as a whole.
    if resolved.recompute and (model is None or resolved.plan is not None):
        raise ConfigError(
            f"recompute={resolved.recompute!r}: needs a model, cswap.install(model, recompute=...)."
            if model is None
            else f"recompute={resolved.recompute!r} with plan: a plan says what is recomputed. "
            "Leave one of them out."
        )
    named = modules_named(resolved.recompute, model) if model is not None else ()
    plan = None if resolved.plan is None else Plan.parse(resolved.plan)
    recompute = modules_to_recompute(plan, model) if plan and model else {}
    unseen = {position for positions in recompute.values() for position in positions}
    engine = SwapEngine(resolved, plan, unseen=unseen)
    tell_of_options(resolved, model)
    return engine, named or tuple(recompute)


class _ScopeRules:
    """The options' rules for a module; to be asked about parents before children."""

    def __init__(self, config: SwapConfig) -> None:
        self._exclude = Selectors(of_modules(config.exclude))
        self._include = Selectors(of_modules(config.include))
        self._includes_all = not config.include
        self._includes_operators = bool(of_operators(config.include))
        codec = config.codec if isinstance(config.codec, dict) else {}
        self._codecs = {k: v for k, v in codec.items() if isinstance(k, str)}
        self._globs = Globs(self._codecs)
        self._excluded: set[str] = set()
        self._included: set[str] = set()

    def __call__(self, path: str, module: torch.nn.Module) -> Scope:
        kind = type(module).__name__
        parent = path.rpartition(".")[0] if path else None
        if parent in self._excluded or self._exclude.matches(path, module):
            self._excluded.add(path)
        if self._includes_all or parent in self._included or self._include.matches(path, module):
            self._included.add(path)
        included = path in self._included
        # A module that is not included may run an operator that is.
        kept = path in self._excluded or not (included or self._includes_operators)
        glob = self._globs.first(path)
        codec = None if glob is None else self._codecs[glob]
        return Scope(path, kind, EXCLUDED if kept else None, codec, included)
