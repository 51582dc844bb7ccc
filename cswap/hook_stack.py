"""The current thread's stack of saved-tensor hooks: torch has no public functions for it.

Note [the top of the stack before torch 2.8]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Before 2.8, torch does not tell which hooks are on top. All of torch's own code pushes and pops them
by two functions of a module, which are looked up there at each call. So for these versions both are
replaced by functions that keep a list besides. Hooks that were pushed before cswap was imported are
not in it.

Note [where hooks are disabled]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`torch.autograd.graph.disable_saved_tensors_hooks` raises its message if any hooks are on the stack,
and where any are pushed inside of it. `torch.func.grad`, `vjp`, `jacrev` and `hessian` use it. A
program that has none of its own must not see ours. So hooks of an `Owner` step aside: they leave
the stack when hooks are disabled, wait if they are to be put on it meanwhile, and come (back) when
hooks are enabled again, if they are still active. Other hooks stay: with these, torch raises as it
does without cswap. torch disables and enables hooks by two functions of a module, too, which are
replaced for this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeAlias

import torch

Pair: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]

_autograd: Final[Any] = torch._C._autograd  # noqa: SLF001


class Owner:
    """Of hooks that step aside where hooks are disabled: its pack hook is a method of it.

    Attributes:
        active: whether it may be put back on the stack.
    """

    __slots__ = ("active",)

    active: bool


class _Pairs(threading.local):
    def __init__(self) -> None:
        self.pairs: list[Pair] = []


def _watch() -> Callable[[bool], Pair | None]:
    # See the Note.
    push_hooks = _autograd._push_saved_tensors_default_hooks  # noqa: SLF001
    pop_hooks = _autograd._pop_saved_tensors_default_hooks  # noqa: SLF001
    pushed = _Pairs()

    def push(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        push_hooks(pack, unpack)
        pushed.pairs.append((pack, unpack))

    def pop() -> None:
        pop_hooks()
        if pushed.pairs:
            pushed.pairs.pop()

    def top(_ignore_tracing: bool) -> Pair | None:
        return pushed.pairs[-1] if pushed.pairs else None

    _autograd._push_saved_tensors_default_hooks = push  # noqa: SLF001
    _autograd._pop_saved_tensors_default_hooks = pop  # noqa: SLF001
    return top


top: Final[Callable[[bool], Pair | None]] = (
    getattr(_autograd, "_top_saved_tensors_default_hooks", None) or _watch()
)
"""The pair on top; None: there is none. False: nor is there while a graph is traced."""

_push: Final[Any] = _autograd._push_saved_tensors_default_hooks  # noqa: SLF001

pop: Final[Any] = _autograd._pop_saved_tensors_default_hooks  # noqa: SLF001
"""Take the hooks on top off."""


_aside: Final = _Pairs()
"""Pairs that wait until hooks are enabled, see Note [where hooks are disabled]."""

_is_enabled: Final[Callable[[], bool]] = _autograd._saved_tensors_hooks_is_enabled  # noqa: SLF001


def are_disabled() -> bool:
    """Whether hooks are disabled in this thread."""
    return not _is_enabled()


def push(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Put the two hooks of an owner on top, now or when hooks are enabled again."""
    if _is_enabled():
        _push(pack, unpack)
    else:
        _aside.pairs.append((pack, unpack))


def owner_of_top() -> object:
    """The object whose method is the pack hook on top; None: there is none, or it is a function."""
    hooks = top(True)
    return None if hooks is None else getattr(hooks[0], "__self__", None)


def drop_inactive() -> None:
    """Forget pairs that wait, and whose owners are no longer active."""
    if _aside.pairs:
        _aside.pairs = [pair for pair in _aside.pairs if _is_active(pair)]


def _is_active(pair: Pair) -> bool:
    owner = getattr(pair[0], "__self__", None)
    return isinstance(owner, Owner) and owner.active


def _step_aside() -> None:
    # Of all owners, or of none if others have hooks on the stack. An interrupt may leave a pair in
    # both places: it comes back twice then, and is taken off twice.
    while isinstance(owner_of_top(), Owner):
        hooks = top(True)
        assert hooks is not None  # it has an owner
        _aside.pairs.insert(0, hooks)
        pop()
    if top(True) is not None:
        _come_back()


def _come_back() -> None:
    drop_inactive()
    pairs, _aside.pairs = _aside.pairs, []
    for pair in pairs:
        _push(*pair)


def _watch_disabling() -> None:
    # See Note [where hooks are disabled].
    disable_hooks = _autograd._saved_tensors_hooks_disable  # noqa: SLF001
    enable_hooks = _autograd._saved_tensors_hooks_enable  # noqa: SLF001

    @wraps(disable_hooks)
    def disable(error_message: str, fail_if_non_empty: bool = True) -> None:
        if not fail_if_non_empty:  # torch's own compiler: the hooks stay on the stack
            disable_hooks(error_message, False)
            return
        if _is_enabled():
            _step_aside()
        disable_hooks(error_message)

    @wraps(enable_hooks)
    def enable() -> None:
        enable_hooks()
        _come_back()

    _autograd._saved_tensors_hooks_disable = disable  # noqa: SLF001
    _autograd._saved_tensors_hooks_enable = enable  # noqa: SLF001


_watch_disabling()
