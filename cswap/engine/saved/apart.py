"""`Apart`: a saved tensor of a wrapper subclass, held as its parts.

Note [a tensor of tensors]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A DTensor, a jagged nested tensor or a quantised one has no memory: it wraps plain tensors. Its
class says which (``__tensor_flatten__``) and makes another of such parts
(``__tensor_unflatten__``), as `torch.compile` needs it. So each part is packed like any saved
tensor, and the wrapper is made anew when backward asks for it.

Autograd counts in-place operators on the wrapper alone, not on its parts, so the wrapper's version
is what has to be compared (`Outer.counter`). Nor do the parts have a history: whether the memory is
an operator's result, which nobody writes uncounted, is the wrapper's to say. Only such results are
taken apart. What else is saved in their memory shares it until a wrapper has written (aliases.py).
No part is computed again: the operators that gave its memory do not know the wrapper's writes.

No codec rounds a part: its wrapper may be quantised already, and its layout is its own affair. Of a
jagged tensor the values leave alone: its offsets are its ragged size, known by their identity.

A class is trusted once one of its tensors has been made anew with the same type, sizes, strides and
parts, and once its ``detach`` has been seen to count with it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cswap.engine.saved.aliases import is_result
from cswap.engine.saved.eligibility import derives_from_parameter, is_tracing, is_wrapped
from cswap.engine.saved.modified import modified_error
from cswap.engine.saved.outer import Outer
from cswap.engine.transfer.handle import nothing_of
from cswap.errors import InternalError
from cswap.log import log

if TYPE_CHECKING:
    from collections.abc import Callable

_STAY: Final = frozenset({"AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor"})
"""Wrappers of values that are not there yet, or never are."""

_TRUSTED: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
"""Classes that were tried, and whether they can be taken apart."""

_TOLD: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of which a tensor could not be, as a log has said."""


class Apart:
    """A saved wrapper, as its parts.

    Attributes:
        outer: the wrapper.
        parts: by name; of those in `packed`, the packed objects.
        packed: names of parts that an engine has packed.
    """

    __slots__ = ("__weakref__", "outer", "packed", "parts")

    def __init__(self, outer: Outer, parts: dict[str, Any], packed: frozenset[str]) -> None:
        """See the attributes."""
        self.outer, self.parts, self.packed = outer, parts, packed

    def unpack(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The wrapper. Args: unpack: for one packed part.

        Raises:
            RuntimeError: autograd's own: the wrapper was modified in place since it was saved.
            InternalError: its class has made a tensor of another layout of the parts.
        """
        outer = self.outer
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - in forward, torch has done so
            if outer.counter._version != outer.version:  # noqa: SLF001
                raise modified_error(outer.counter, outer.sizes, outer.version)
            parts = {n: unpack(x) if n in self.packed else x for n, x in self.parts.items()}
            found = _made_of(outer, parts)
            if found.size() != outer.sizes or found.stride() != outer.strides:
                raise InternalError(f"{outer.kind.__name__}: made anew, it has another layout")
        return found


def take_apart(
    tensor: torch.Tensor, pack: Callable[[torch.Tensor, Outer], Any], least_bytes: int
) -> Apart | None:
    """The parts of a wrapper that is being saved; None: it stays as it is.

    Args:
        tensor: of a subclass.
        pack: for one part that may leave, of a wrapper.
        least_bytes: of such a part.
    """
    kind = type(tensor)
    if kind.__name__ in _STAY or not _TRUSTED.get(kind, True) or is_tracing():
        return None
    try:
        if not is_traceable_wrapper_subclass(tensor) or is_wrapped(tensor):
            return None
        if not is_result(tensor) or derives_from_parameter(tensor):
            return None
        names, settings = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        leaving = [name for name, x in parts.items() if _may_leave(x, tensor, least_bytes)]
        if not leaving or any(
            isinstance(x, torch.Tensor) and not x.is_leaf for x in parts.values()
        ):
            return None  # a history could lead back to the node that saves it
        counter = tensor.detach()
        outer = Outer(tensor, settings, counter)
        trusted = _TRUSTED.get(kind)
        if trusted is None:
            _TRUSTED[kind] = trusted = _is_remade(tensor, outer, parts)
        if not trusted:
            return None
        for name in leaving:
            setattr(counter, name, nothing_of(parts[name].dtype, parts[name].device))
        if any(getattr(tensor, name) is not part for name, part in parts.items()):
            _TRUSTED[kind] = False  # its detached copies share more than the parts
            for name in leaving:
                setattr(counter, name, parts[name])
            return None
    except Exception as error:  # a subclass may raise anything; torch, for some views of parts
        if kind not in _TOLD:
            _TOLD.add(kind)
            log.info("A saved tensor of class %s stays as it is: %s", kind.__name__, error)
        return None
    packed = frozenset(leaving)
    return Apart(outer, {n: pack(x, outer) if n in packed else x for n, x in parts.items()}, packed)


def _may_leave(part: object, tensor: torch.Tensor, least_bytes: int) -> bool:
    if type(part) is not torch.Tensor or part.layout is not torch.strided:
        return False
    if part.nbytes < least_bytes:
        return False
    if part.is_nested or is_wrapped(part):
        return False
    return part.is_floating_point() or not tensor.is_nested


def _made_of(outer: Outer, parts: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = outer.kind.__tensor_unflatten__(
            parts, outer.settings, outer.sizes, outer.strides
        )
    return made


def _is_remade(tensor: torch.Tensor, outer: Outer, parts: dict[str, Any]) -> bool:
    # Whether such tensors can be made of their parts, and their detached copies count with them.
    counter, made = outer.counter, _made_of(outer, dict(parts))
    if tensor.data_ptr():  # it has memory of its own, which the copy would hold
        return False
    if type(made) is not outer.kind or type(counter) is not outer.kind or counter is tensor:
        return False
    names, settings = made.__tensor_flatten__()  # type: ignore[attr-defined]
    if list(names) != list(parts) or type(settings) is not type(outer.settings):
        return False
    if (made.dtype, made.device, made.size(), made.stride()) != (
        *(tensor.dtype, tensor.device),
        *(outer.sizes, outer.strides),
    ):
        return False
    if any(getattr(made, name) is not part for name, part in parts.items()):
        return False
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):  # noqa: SLF001
        torch.autograd.graph.increment_version(tensor)
        return counter._version == outer.version + 1  # noqa: SLF001
