"""Runs a module's forward again in backward: `checkpointed`.

Note [a second forward]
~~~~~~~~~~~~~~~~~~~~~~~
torch's checkpointing runs a module's forward again in backward, with the random state and the
autocast state of the first time. So the gradients keep their bits, as long as the forward does
nothing else than to compute, from what it was given the first time:

* Containers among the arguments are copied, since a caller may append to a list, or a forward put
  its result into the dict that it was given.
* Tensors within them, and those given by keyword, are compared by their versions, as torch does it
  with the others.
* Parameters, buffers and modes are those of the first time: `torch.func.functional_call` takes
  its own away, and a program may change the mode before backward. A parameter or buffer that was
  modified since raises, as without recomputation.
* Batch and instance norms that keep running statistics would count a batch twice: they have copies
  of these, which changes no output.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from cswap.engine.saved.modified import modified_error
from cswap.hook_stack import are_disabled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

NORMS: Final = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Modules that write statistics in a forward in training, and do not read them there."""


class _Held(NamedTuple):
    """A parameter or buffer of a module in the first forward.

    Attributes:
        place: the module's dictionary in which it is.
        name: in that dictionary.
        tensor: it.
        version: of the tensor; None: a batch norm counts in it.
    """

    place: dict[str, Any]
    name: str
    tensor: torch.Tensor | None
    version: int | None


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors in arguments, those within containers included."""
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def checkpointed(
    forward: Callable[..., Any],
    module: torch.nn.Module,
    around: Callable[[], AbstractContextManager[object]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The result of a module's forward, which is run again in backward. See the Note.

    Args:
        forward: the module's own.
        module: it.
        around: makes the context around the second forward.
        args: of the forward.
        kwargs: of the forward.
    """
    if not torch.is_grad_enabled() or is_compiling() or are_disabled():  # torch's needs hooks
        return forward(*args, **kwargs)
    given = _copied((args, kwargs))
    others = [x for x in given[0] if not isinstance(x, torch.Tensor)]
    within = [(x, _version(x)) for x in tensors_of((others, kwargs))]
    state, modes = _state_of(module), [(m, m.training) for m in module.modules()]
    is_first = True

    def run(*tensors: Any) -> Any:
        # tensors: args, of which torch keeps the tensors as autograd does.
        nonlocal is_first
        if is_first:
            is_first = False
            return forward(*args, **kwargs)
        for x, version in within:
            _check(x, version)
        own, keywords = _copied(given)
        own = [x if isinstance(x, torch.Tensor) else y for x, y in zip(tensors, own, strict=True)]
        with _as_before(state, modes), _copied_statistics(module), around():
            return forward(*own, **keywords)

    return checkpoint(run, *args, use_reentrant=False)


def checkpointed_alone(
    forward: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """The same with nothing around the second forward."""
    return checkpointed(forward, module, nullcontext, *args, **kwargs)


def _copied(values: Any) -> Any:
    return tree_map(_same, values)


def _same(x: Any) -> Any:
    return x


def _version(x: torch.Tensor) -> int | None:
    return None if is_lazy(x) or x.is_inference() else x._version  # noqa: SLF001


def _check(x: torch.Tensor, version: int | None) -> None:
    if version is not None and x._version != version:  # noqa: SLF001
        raise modified_error(x, x.shape, version)


def _state_of(module: torch.nn.Module) -> list[_Held]:
    found = []
    for m in module.modules():
        counts = isinstance(m, NORMS) and m.training
        for place, is_counted in ((m._parameters, False), (m._buffers, counts)):  # noqa: SLF001
            for name, x in place.items():
                version = None if x is None or is_counted else _version(x)
                found.append(_Held(place, name, x, version))
    return found


@contextmanager
def _as_before(state: list[_Held], modes: list[tuple[torch.nn.Module, bool]]) -> Iterator[None]:
    # Parameters, buffers and modes as they were. Raises autograd's own error if one was modified.
    for held in state:
        if held.tensor is not None:
            _check(held.tensor, held.version)
    with ExitStack() as back:
        for held in state:
            now = held.place.get(held.name)
            if now is not held.tensor:
                back.callback(held.place.__setitem__, held.name, now)
                held.place[held.name] = held.tensor
        for module, training in modes:
            if module.training is not training:
                back.callback(setattr, module, "training", module.training)
                module.training = training
        yield


@contextmanager
def _copied_statistics(module: torch.nn.Module) -> Iterator[None]:
    # See Note [a second forward].
    own = [(m, dict(m._buffers)) for m in module.modules() if isinstance(m, NORMS) and m.training]  # noqa: SLF001
    try:
        for norm, buffers in own:
            for name, buffer in buffers.items():
                norm._buffers[name] = None if buffer is None else buffer.clone()  # noqa: SLF001
        yield
    finally:
        for norm, buffers in own:
            norm._buffers.update(buffers)  # noqa: SLF001
