"""Runs a module's forward again in backward: `checkpointed`.

Note [a second forward]
~~~~~~~~~~~~~~~~~~~~~~~
torch's checkpointing runs a module's forward again in backward, with the random state and the
autocast state of the first time. So the gradients keep their bits, as long as the forward does
nothing else than to compute, from what it was given the first time:

* Every tensor among the arguments is given to torch once, so a version is compared for each, and
  arguments that were one object are one object again. Containers are built anew, since a caller
  may append to a list, or a forward put its result into the dict that it was given.
* Parameters, buffers, modes and ``requires_grad`` are those of the first time:
  `torch.func.functional_call` takes its own away, and a program may change a mode or freeze a
  parameter before backward. A parameter or buffer that was modified since raises, as without
  recomputation.
* Batch and instance norms that keep running statistics would count a batch twice. The second
  forward has copies of these, as they were before the first one: a forward may read them before the
  norm writes them.
* Python's and NumPy's random numbers are those of the first time, too.

Any other state that a forward writes (module_state.py) makes its second run another one. It is
looked for in the first calls of each module, and is an error there.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from cswap.engine.saved.modified import modified_error
from cswap.guard.module_rerun import Randomness
from cswap.hook_stack import are_disabled
from cswap.module_state import counts_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

_NO_GPUS: Final[frozenset[torch.device]] = frozenset()


class _Held(NamedTuple):
    """A parameter or buffer of a module in the first forward.

    Attributes:
        place: the module's dictionary in which it is.
        name: in that dictionary.
        tensor: it.
        version: of the tensor; None: it has none, or it is a norm's statistic.
        requires_grad: of the tensor.
        before: of a norm's statistic, a copy from before the first forward.
    """

    place: dict[str, Any]
    name: str
    tensor: torch.Tensor | None
    version: int | None
    requires_grad: bool
    before: torch.Tensor | None


def is_possible() -> bool:
    """Whether there is a backward that could run a forward again; torch's way needs hooks."""
    return torch.is_grad_enabled() and not is_compiling() and not are_disabled()


def checkpointed(
    forward: Callable[..., Any],
    module: torch.nn.Module,
    around: Callable[[torch.nn.Module], AbstractContextManager[object]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The result of a module's forward, which is run again in backward. See the Note.

    The caller has asked `is_possible`.

    Args:
        forward: the module's own.
        module: it.
        around: makes the context around the second forward of a module.
        args: of the forward.
        kwargs: of the forward.
    """
    call = _Call(module, args, kwargs)
    is_first = True

    def run(*tensors: torch.Tensor) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return forward(*args, **kwargs)
        own, keywords = call.arguments(tensors)
        with call.as_before(), around(module):
            return forward(*own, **keywords)

    return checkpoint(run, *call.tensors, use_reentrant=False)


class _Argument(int):
    """Number of a tensor among those that torch keeps for the second forward."""


class _Call:
    """A module's arguments and state in its first forward.

    Attributes:
        tensors: the arguments' tensors, each object once.
    """

    def __init__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        flat, self._spec = tree_flatten((args, dict(kwargs)))
        self.tensors: list[torch.Tensor] = []
        numbers: dict[int, _Argument] = {}
        for x in flat:
            if _can_be_saved(x) and id(x) not in numbers:
                numbers[id(x)] = _Argument(len(self.tensors))
                self.tensors.append(x)
        self._flat = [numbers.get(id(x), x) for x in flat]
        self._state, self._modes = _state_of(module), [(m, m.training) for m in module.modules()]
        self._randomness = Randomness.now(_NO_GPUS)

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], Any]:
        """The arguments again, in new containers. Args: tensors: in place of the first ones."""
        given = [tensors[x] if isinstance(x, _Argument) else x for x in self._flat]
        args, kwargs = tree_unflatten(given, self._spec)
        return args, kwargs

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Parameters, buffers, modes and random numbers as they were before the first forward.

        Raises:
            RuntimeError: autograd's own, if a parameter or a buffer was modified since.
        """
        for held in self._state:
            if held.version is not None and held.tensor is not None:
                _check(held.tensor, held.version)
        with ExitStack() as back:
            back.callback(Randomness.now(_NO_GPUS).restore)
            self._randomness.restore()
            for held in self._state:
                _put_back(held, back)
            for module, training in self._modes:
                if module.training is not training:
                    back.callback(setattr, module, "training", module.training)
                    module.training = training
            yield


def _put_back(held: _Held, back: ExitStack) -> None:
    wanted = held.tensor if held.before is None else held.before.clone()
    now = held.place.get(held.name)
    if now is not wanted:
        back.callback(held.place.__setitem__, held.name, now)
        held.place[held.name] = wanted
    if wanted is not None and wanted.is_leaf and wanted.requires_grad is not held.requires_grad:
        back.callback(wanted.requires_grad_, wanted.requires_grad)
        wanted.requires_grad_(held.requires_grad)


def _can_be_saved(x: Any) -> bool:
    # Others are held as they are: autograd keeps no inference tensors.
    return isinstance(x, torch.Tensor) and not is_lazy(x) and not x.is_inference()


def _check(x: torch.Tensor, version: int) -> None:
    if x._version != version:  # noqa: SLF001
        raise modified_error(x, x.shape, version)


def _state_of(module: torch.nn.Module) -> list[_Held]:
    found = []
    for m in module.modules():
        counts = counts_batches(m)
        for place, is_counted in ((m._parameters, False), (m._buffers, counts)):  # noqa: SLF001
            for name, x in place.items():
                version = before = None
                if x is not None and _can_be_saved(x):
                    version = None if is_counted else x._version  # noqa: SLF001
                    before = x.detach().clone() if is_counted else None
                requires_grad = x is not None and x.requires_grad
                found.append(_Held(place, name, x, version, requires_grad, before))
    return found
