"""pack/unpack for autograd's saved-tensor hooks, and the module hooks that switch them on.

Nothing is decided here: what happens to a tensor is the engine's business.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.utils.hooks import RemovableHandle

    from cswap.engine.engine import SwapEngine
    from cswap.engine.scope import Scope, ScopeStack


class OperatorRecorder(TorchFunctionMode):
    """Notes which torch function the user's code is calling: norms and losses must stay exact."""

    def __init__(self, scopes: ScopeStack) -> None:
        super().__init__()
        self._scopes = scopes

    def withdraw(self) -> None:
        """Leave torch's stack of modes, if nobody has pushed on top since."""
        if _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)

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


class _Recorders(threading.local):
    def __init__(self) -> None:
        self.stack: list[OperatorRecorder] = []


class SavedTensorHooks:
    """The two autograd hooks of one engine; a context manager, re-entrant, per thread."""

    def __init__(self, engine: SwapEngine) -> None:
        """Args: engine: what packs and unpacks."""
        self._engine = engine
        self._recorders = _Recorders()
        self._active = True

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)  # noqa: SLF001
        if self._engine.wants_operators:
            recorder = OperatorRecorder(self._engine.scopes)
            recorder.__enter__()  # type: ignore[no-untyped-call]
            self._recorders.stack.append(recorder)

    def __exit__(self, *exception: object) -> None:
        if self._recorders.stack:
            self._recorders.stack.pop().withdraw()
        torch._C._autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001

    def pack(self, tensor: torch.Tensor) -> object:
        """See `SwapEngine.pack`."""
        return self._engine.pack(tensor) if self._active else self._engine.pass_through(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """See `SwapEngine.unpack`."""
        return self._engine.unpack(packed)

    def withdraw(self) -> None:
        """Leave a stack that others may have pushed on: take the pair off, or make it inert."""
        self._active = False
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001
        if top is not None and top[0] == self.pack:
            self.__exit__()


class ModuleHooks:
    """Switches the autograd hooks on while a model runs forward, and tracks the module path."""

    def __init__(
        self,
        model: torch.nn.Module,
        engine: SwapEngine,
        hooks: SavedTensorHooks,
        scope_of: Callable[[str, torch.nn.Module], Scope],
    ) -> None:
        self._model = model
        self._engine = engine
        self._hooks = hooks
        self._guard = engine.make_guard(model)
        self._handles: list[RemovableHandle] = []
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._track(module, scope_of(path, module))
        self._handles += [
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Take every hook off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._guard is not None:
            self._guard.remove()

    def _track(self, module: torch.nn.Module, scope: Scope) -> None:
        scopes = self._engine.scopes

        def enter(_module: torch.nn.Module, _args: Any) -> None:
            scopes.push(scope)

        def leave(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
            scopes.pop()

        self._handles += [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _enter(self, _module: torch.nn.Module, _args: Any) -> None:
        if self._guard is not None:
            self._guard.begin_step()
        self._engine.begin_step()
        self._engine.own(self._owned())
        self._hooks.__enter__()

    def _leave(self, _module: torch.nn.Module, _args: Any, _output: Any) -> None:
        self._hooks.__exit__()

    def _owned(self) -> Iterable[torch.Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
