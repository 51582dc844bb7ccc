"""The attributes and hooks that cswap puts onto a module; copies of the module come without them.

Note [copies come without cswap]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A copy of an installed model (`copy.deepcopy`, `pickle`, `torch.save`, `AveragedModel`, the
arguments of a spawned process) is a model like any other: it may outlive the engine, and it may be
loaded where cswap is not installed. All of these ask a module for its state, so each patched module
has a ``__getstate__`` of its own that leaves out whatever is marked as cswap's. `torch.jit.script`
would compile the hooks; it asks for ``__prepare_scriptable__``, and gets an error in words.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.utils.hooks import RemovableHandle

_HOOK_DICTS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
_HOOK_FLAGS: Final = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Of the hooks in those, by the same keys."""

_MARK: Final = "_made_by_cswap"


def mark(value: Any) -> Any:
    """Mark a function, a method of ours, or an object with attributes as cswap's; returns it."""
    setattr(getattr(value, "__func__", value), _MARK, True)
    return value


def is_marked(value: Any) -> bool:
    """Whether a value was marked; a bound method is if its function is."""
    return getattr(value, _MARK, False) is True


class ModulePatch:
    """The attributes that cswap sets on one module, until `remove`.

    They are set on the instance, not on its class: other models are not concerned.

    Attributes:
        module: the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Args: module: to be patched; it may be patched several times."""
        self.module = module
        self._on = True
        self._handles: list[RemovableHandle] = []
        self._set: list[_Attribute] = []
        _patched[module] = _patched.get(module, 0) + 1
        if _patched[module] == 1:
            module.__dict__["__getstate__"] = mark(_State(weakref.ref(module)))
            if hasattr(type(module), "__deepcopy__"):
                module.__dict__["__deepcopy__"] = mark(_DeepCopy(weakref.ref(module)))
            module.__dict__["__prepare_scriptable__"] = mark(_refuse_script)
            module.__dict__["_set_by_cswap"] = mark(_Attributes())
        # Owned by the module: they refer to it.
        self._attributes: _Attributes = module.__dict__["_set_by_cswap"]

    def set(self, name: str, value: Any) -> None:
        """Set a marked attribute of the instance."""
        attribute = _Attribute(name, value, self.module.__dict__.get(name, _ABSENT))
        self._set.append(attribute)
        self._attributes.append(attribute)
        self.module.__dict__[name] = value

    def pre_hook(self, hook: Callable[..., Any], **options: Any) -> None:
        """Register a forward pre-hook; options as torch's."""
        self._handles.append(self.module.register_forward_pre_hook(mark(hook), **options))

    def hook(self, hook: Callable[..., Any], **options: Any) -> None:
        """Register a forward hook; options as torch's."""
        self._handles.append(self.module.register_forward_hook(mark(hook), **options))

    def remove(self) -> None:
        """Take everything off; an attribute that somebody else has replaced since stays.

        A second time does nothing.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for attribute in reversed(self._set):
            self._take_back(attribute)
        self._set.clear()
        if not self._on:
            return
        self._on = False
        _patched[self.module] -= 1
        if not _patched[self.module]:
            del _patched[self.module]
            self.module.__dict__.pop("__getstate__", None)
            self.module.__dict__.pop("__deepcopy__", None)
            self.module.__dict__.pop("__prepare_scriptable__", None)
            self.module.__dict__.pop("_set_by_cswap", None)

    def _take_back(self, attribute: _Attribute) -> None:
        name, before = attribute.name, attribute.before
        self._attributes.remove(attribute)
        for other in self._attributes:
            if other.name == name and other.before is attribute.value:
                other.before = before  # another patch, which came later, will take that back
        if self.module.__dict__.get(name, _ABSENT) is not attribute.value:
            return
        if before is _ABSENT:
            del self.module.__dict__[name]
        else:
            self.module.__dict__[name] = before


@dataclass(eq=False, slots=True)
class _Attribute:
    # Of a module: set by a patch, and its value before.
    name: str
    value: Any
    before: Any


class _Attributes(list[_Attribute]):
    # Of a module: all that patches have set, in order.
    pass


class _State:
    """``module.__getstate__`` without cswap's own; weak, or a module would refer to itself."""

    def __init__(self, module: weakref.ref[torch.nn.Module]) -> None:
        self._module = module

    def __call__(self) -> Any:
        module = self._module()
        if module is None:
            raise ConfigError("module: the original of this copied attribute is gone.")
        own = getattr(type(module), "__getstate__", None)
        state = module.__dict__ if own is None else own(module)
        return without_patches(state) if isinstance(state, dict) else state


class _DeepCopy:
    """``module.__deepcopy__`` of its class, which may read ``__dict__``, without cswap's own."""

    def __init__(self, module: weakref.ref[torch.nn.Module]) -> None:
        self._module = module

    def __call__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        if module is None:
            raise ConfigError("module: the original of this copied attribute is gone.")
        attributes = module.__dict__
        patched = dict(attributes)
        clean = without_patches(patched)
        try:
            attributes.clear()
            attributes.update(clean)
            return type(module).__deepcopy__(module, memo)  # type: ignore[attr-defined]
        finally:
            attributes.clear()
            attributes.update(patched)


def without_patches(state: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes without cswap's: a new dict, and new dicts of hooks."""
    clean = {name: value for name, value in state.items() if not is_marked(value)}
    ours: set[int] = set()
    for name in _HOOK_DICTS:
        hooks = clean.get(name)
        if hooks and any(is_marked(hook) for hook in hooks.values()):
            ours.update(key for key, hook in hooks.items() if is_marked(hook))
            clean[name] = OrderedDict((k, hook) for k, hook in hooks.items() if k not in ours)
    for name in _HOOK_FLAGS:
        if ours and clean.get(name):
            clean[name] = OrderedDict((k, v) for k, v in clean[name].items() if k not in ours)
    return clean


def _refuse_script() -> None:
    raise ConfigError(
        "torch.jit.script: this model is installed, and a script cannot hold its hooks. "
        "Call remove() on the handle that cswap.install returned, and script it then."
    )


_ABSENT: Final = object()

_patched: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
"""How many patches a module has. The first sets the attributes of the Note."""
