"""pack/unpack for autograd's saved-tensor hooks, and the model call that switches them on.

Nothing is decided here: the engine decides about each tensor.

Note [hooks end with the call]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch runs a module's forward hooks after an `Exception`, but not after a KeyboardInterrupt, a
SystemExit or a GeneratorExit. So an installed model's ``forward`` is wrapped, in try/finally.
Python may raise an interrupt at the beginning and at the end of every call, of a call that cleans
up, too.
So the first statement of the ``finally``, an assignment, makes the pair of hooks inactive: that
cannot be interrupted. An inactive pair leaves tensors alone. It is taken off torch's stack as soon
as it is on top: at once, or, if an interrupt prevented that, by the next call or by its own next
pack.
"""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from cswap import checkpoint_inputs as checkpoint_inputs  # which watches torch's checkpointing
from cswap import hook_stack
from cswap.dynamo import begin_below, leave_alone, set_compiler, warn_of_tracing
from cswap.engine.saved.module_stack import OUTSIDE
from cswap.errors import ConfigError
from cswap.guard.guard import make_guard
from cswap.hook_stack import are_disabled
from cswap.module_calls import FollowedModule
from cswap.module_patch import ModulePatch, mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cswap.engine.engine import SwapEngine
    from cswap.engine.saved.module_stack import Scope, ScopeStack
    from cswap.removable import Removable


class OperatorRecorder(TorchFunctionMode):
    """Notes which torch function the user's code is calling: norms and losses must stay exact.

    Attributes:
        active: as of the pair of hooks that it was pushed with.
    """

    def __init__(self, scopes: ScopeStack) -> None:
        super().__init__()
        self._scopes = scopes
        self.active = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with its name noted."""
        outer = self._scopes.operator
        self._scopes.operator = getattr(func, "__name__", "")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._scopes.operator = outer


begin_below(OperatorRecorder.__torch_function__)


class HookPair(hook_stack.Owner):
    """One push of an engine's two hooks onto a thread's stack. See the Note.

    Attributes:
        active: whether the engine gets the tensors that are saved.
    """

    __slots__ = ("__weakref__", "_engine", "_pack", "_recorder", "_unpack")

    def __init__(self, engine: SwapEngine) -> None:
        """Args: engine: packs and unpacks."""
        self.active = True
        self._engine = engine
        hooks = engine.stand_in or engine
        self._pack: Callable[[torch.Tensor], object] = hooks.pack
        self._unpack: Callable[[Any], torch.Tensor] = hooks.unpack
        self._recorder = OperatorRecorder(engine.scopes) if engine.wants_operators else None

    def push(self) -> None:
        """Put the pair on this thread's stack: now, or when hooks are enabled again."""
        hook_stack.push(self.pack, self._unpack)
        if self._recorder is not None:
            self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def withdraw(self) -> None:
        """Make the pair inactive, and take it off this thread's stack if it is on top."""
        self.retire()
        take_off_inactive()

    def retire(self) -> None:
        """Make the pair inactive."""
        self.active = False
        if self._recorder is not None:
            self._recorder.active = False

    @leave_alone
    def pack(self, tensor: torch.Tensor) -> object:
        """See `SwapEngine.pack`."""
        if self.active:
            return self._pack(tensor)
        take_off_inactive()
        return self._engine.pass_through(tensor)


def take_off_inactive() -> None:
    """Pop pairs and recorders of ours that are inactive off the tops of this thread's stacks."""
    while isinstance(pair := hook_stack.owner_of_top(), HookPair) and not pair.active:
        hook_stack.pop()
    while isinstance(mode := _get_current_function_mode(), OperatorRecorder) and not mode.active:  # type: ignore[no-untyped-call]
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    hook_stack.drop_inactive()


class Swapping:
    """An engine's hooks on this thread, inside a ``with``; it may be entered again inside.

    `cswap.swapping` makes one.
    """

    def __init__(self, engine: SwapEngine) -> None:
        """Args: engine: packs and unpacks."""
        self._engine = engine
        self._entered = _Entered()

    def __enter__(self) -> SwapEngine:
        pair = HookPair(self._engine)
        # If an interrupt keeps __exit__ from running, the ``with`` lets go of this object all the
        # same.
        self._entered.pairs.append((pair, weakref.finalize(self, pair.retire)))
        try:
            pair.push()
        except BaseException:
            self._leave()
            raise
        return self._engine

    def __exit__(self, *exception: object) -> None:
        self._leave()
        self._engine.rest()

    def _leave(self) -> None:
        pair, finalizer = self._entered.pairs.pop()
        pair.withdraw()
        finalizer.detach()


class _Entered(threading.local):
    def __init__(self) -> None:
        self.pairs: list[tuple[HookPair, weakref.finalize[Any, Any]]] = []


class ModuleHooks:
    """Switches the autograd hooks on while a model runs forward, and tracks the module path.

    Attributes:
        handle: removes these hooks and all that was installed with them.
    """

    handle: Removable

    def __init__(
        self,
        model: torch.nn.Module,
        engine: SwapEngine,
        scope_of: Callable[[str, torch.nn.Module], Scope],
        entry: str = "forward",
    ) -> None:
        """Put the hooks on.

        Args:
            model: whose tensors are swapped.
            engine: swaps them.
            scope_of: gives the rules of a module; asked about parents before children.
            entry: name of the model's method during which the hooks are on.
        """
        self._engine, self._model = engine, model
        self._guard = make_guard(model, engine)
        self._patches: list[ModulePatch | FollowedModule] = []
        scopes = {path: scope_of(path, module) for path, module in model.named_modules()}
        self._call = _ModelCall(model, engine, scopes.pop(""), entry)
        self._others = scopes  # of modules that are not tracked
        self.track(
            path for path, module in model.named_modules() if type(module) not in _SAVE_NOTHING
        )
        patch = ModulePatch(model)
        self._patches.append(patch)
        if entry == "forward":
            patch.pre_hook(self._begin, prepend=True)
        else:  # no hook of the model itself runs before it
            self._call.before = self._begin
        forward = self._call.wrapped(getattr(model, entry))
        forward.installed = self  # type: ignore[attr-defined]
        patch.set(entry, types.MethodType(forward, model))
        patch.set("_replicate_for_data_parallel", mark(self._call.replicate))

    def track(self, paths: Iterable[str]) -> None:
        """Track these modules, too, from the next call of the model on: they save tensors."""
        for path in paths:
            module, scope = self._model.get_submodule(path), self._others.pop(path, None)
            if scope is not None and not isinstance(module, torch.jit.ScriptModule):
                followed = FollowedModule(module, scope, self._engine.scopes)
                self._patches.append(followed)

    def remove(self) -> None:
        """Take everything off the model."""
        self._call.active = False
        for patch in self._patches:
            patch.remove()
        self._patches.clear()
        if self._guard is not None:
            self._guard.remove()
        take_off_inactive()

    def _begin(self, *_call: Any) -> None:
        if is_compiling() or are_disabled():
            return
        compiler = set_compiler(None)
        if self._guard is not None:  # before its own hooks on the model, if that is a single module
            self._guard.begin_step()
        set_compiler(compiler)


_SAVE_NOTHING: Final = (torch.nn.Identity, torch.nn.Sequential)
"""Modules that save nothing themselves, unless they are recomputed: then they save their inputs.
To follow a module takes some microseconds in every step."""


class _ModelCall:
    """Runs a model's forward with the hooks on.

    Attributes:
        active: False once the model is no longer installed; somebody may have kept the wrapper.
        before: called at the beginning of each call, if anything.
    """

    before: Callable[[], None] | None = None

    def __init__(
        self, model: torch.nn.Module, engine: SwapEngine, scope: Scope, entry: str
    ) -> None:
        self._model = model
        self._engine = engine
        self._scope = scope
        self._entry = entry
        self.active = True

    def wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that takes the module, or its replica, and the arguments of its forward."""
        is_method = getattr(original, "__self__", None) is self._model
        function = getattr(original, "__func__", None) if is_method else None

        @wraps(original if function is None else function)
        def forward(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            target = original if function is None else function
            given = args if function is None else (module, *args)
            if not self.active or (is_compiling() and warn_of_tracing()) or are_disabled():
                return target(*given, **kwargs)
            return self._run(target, given, kwargs)

        begin_below(forward)

        self._forward = mark(forward)
        if function is None:  # the signature that callers are to see has no module in it
            forward.__signature__ = _with_module(original)  # type: ignore[attr-defined]
        return forward

    def replicate(self) -> torch.nn.Module:
        """See `torch.nn.parallel.replicate`: a replica of the model swaps, too."""
        replica: torch.nn.Module = type(self._model)._replicate_for_data_parallel(self._model)  # type: ignore[no-untyped-call]  # noqa: SLF001
        replica.__dict__.pop("_replicate_for_data_parallel", None)
        replica.__dict__[self._entry] = types.MethodType(self._forward, replica)
        return replica

    def _run(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        compiler = set_compiler(None)
        if self.before is not None:
            self.before()
        self._engine.begin_step()
        if self._engine.sits_out:
            set_compiler(compiler)
            return _call(target, args, kwargs)
        if self._engine.wants_owned:
            self._engine.own(self._owned())
        scopes = self._engine.scopes
        before = scopes.stack
        pair = HookPair(self._engine)
        try:
            scopes.stack = [OUTSIDE, self._scope]
            pair.push()
            set_compiler(compiler)
            return _call(target, args, kwargs)
        finally:
            pair.active = False  # first, and no call before it: see the Note
            set_compiler(None)
            scopes.stack = before
            pair.withdraw()
            set_compiler(compiler)

    def _owned(self) -> Iterable[torch.Tensor]:
        # As parameters() and buffers(), which take some calls for each module.
        waiting, seen = [self._model], {self._model}
        while waiting:
            module = waiting.pop()
            for tensors in (module._parameters, module._buffers):  # noqa: SLF001
                for tensor in tensors.values():
                    if tensor is not None:
                        yield tensor
            for child in module._modules.values():  # noqa: SLF001
                if child is not None and child not in seen:
                    seen.add(child)
                    waiting.append(child)


def _call(target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    # The frame where torch.compile begins: it does not look into frames of torch's own modules,
    # such as nn.Sequential's, when they come first.
    return target(*args, **kwargs)


for _function in (_ModelCall._run, ModuleHooks._begin):  # noqa: SLF001
    begin_below(_function)


def _with_module(original: Callable[..., Any]) -> inspect.Signature:
    # Of a function that takes a module before the arguments of ``original``.
    module = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
    try:
        signature = inspect.signature(original)
    except (TypeError, ValueError):  # a callable that does not say
        rest = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        named = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        return inspect.Signature([module, rest, named])
    return signature.replace(parameters=[module, *signature.parameters.values()])


def installed_on(model: torch.nn.Module) -> Removable | None:
    """The handle of the `cswap.install` that this model is under, if it is."""
    for value in model.__dict__.values():
        if isinstance(value, types.MethodType):
            hooks = getattr(value, "installed", None)
            if isinstance(hooks, ModuleHooks):
                return hooks.handle
    return None


def check_model(model: object) -> None:
    """Refuse a model that cannot be installed.

    Raises:
        ConfigError: no module, or a scripted one, which runs without Python hooks.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model={type(model).__name__}: must be a torch.nn.Module, or None for everything."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError(
            f"model={type(model).__name__}: a scripted model runs without Python hooks. "
            "Install the module that it was scripted from."
        )
