"""Follows the calls of a model's modules: `FollowedModule`.

Note [calls are followed around _call_impl]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``module(x)`` runs ``module._call_impl``, which runs the hooks of the module and its ``forward``. A
module with any hook goes a longer way there, of some twenty calls; with cold caches that took 8 us
for each module. So the instance has a ``_call_impl`` of its own, around that of its class. All
hooks, and whatever others put in the place of ``forward``, run inside of it. A module that was
compiled by its own ``compile()`` runs ``_compiled_call_impl`` instead.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

from torch.compiler import is_dynamo_compiling

from cswap.dynamo import begin_below
from cswap.module_patch import ModulePatch, mark

if TYPE_CHECKING:
    import torch

    from cswap.engine.saved.module_stack import Scope, ScopeStack


class FollowedModule:
    """A module whose calls are followed until `remove`, on the stack of scopes."""

    def __init__(self, module: torch.nn.Module, scope: Scope, scopes: ScopeStack) -> None:
        """Begin with the next call.

        Args:
            module: it.
            scope: is on the stack while it runs.
            scopes: the stack.
        """
        self._patch, self._on = ModulePatch(module), True
        name = "_call_impl" if module._compiled_call_impl is None else "_compiled_call_impl"  # noqa: SLF001
        inside = _Inside(module, name)
        own = inside.own

        def call(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # In a graph, our state of this moment would be a constant.
            if is_dynamo_compiling() or not self._on:
                return inside.run(module, args, kwargs)
            stack = scopes.stack
            stack.append(scope)
            try:
                if own is None:
                    return type(module)._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001
                return inside.run(module, args, kwargs)
            finally:
                stack.pop()

        begin_below(call)
        self._patch.set(name, types.MethodType(mark(call), module))

        def replicate() -> torch.nn.Module:
            # See `torch.nn.parallel.replicate`.
            replica: torch.nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]  # noqa: SLF001
            replica.__dict__.pop("_replicate_for_data_parallel", None)
            replica.__dict__[name] = types.MethodType(call, replica)
            return replica

        self._patch.set("_replicate_for_data_parallel", mark(replicate))

    def remove(self) -> None:
        """Leave the module as it was."""
        self._on = False  # somebody may have kept the function
        self._patch.remove()


class _Inside:
    # The function that a followed module runs: that of its class, or one that was there before.

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.own = own = module.__dict__.get(name)
        # Of another model that follows the module: a replica of the module needs its own.
        is_bound = isinstance(own, types.MethodType) and own.__self__ is module
        self._function: Any = getattr(own, "__func__", None) if is_bound else None

    def run(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self.own is None:
            return type(module)._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001
        if self._function is not None:
            return self._function(module, *args, **kwargs)
        return self.own(*args, **kwargs)


begin_below(_Inside.run)
