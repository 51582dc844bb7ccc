"""Keeps one call of one module, to run it again with exact or with lossy saved tensors.

Note [a call that is run again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The user's objects are never changed. When the module is called, its arguments, parameters, buffers
and tensors in plain attributes are copied to host memory. So the copies hold no device memory at
the peak of the step. They also stay valid if an optimizer works inside backward, or if sharding
frees the parameters.

The module is copied shallowly by `nn.Module`'s own protocol for replicas. Hooks on the copy do not
run, and attributes that forward assigns stay on the copy. Each run has copies of everything and a
graph of its own. Random numbers, autocast and grad mode are those of the call. After the run the
random generators get their previous states back.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from cswap.codecs.layout import meta_of
from cswap.engine.saved.eligibility import reason_to_keep
from cswap.errors import UnsupportedError
from cswap.module_patch import is_marked, mark, without_patches
from cswap.ranks import without_collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_PLAIN: Final = (
    type(None), bool, int, float, complex, str, bytes, slice, torch.dtype, torch.device,
    torch.Size, torch.memory_format,
)  # fmt: skip
"""Types of arguments that runs may share, because their values cannot be changed."""

_OWN: Final = mark(lambda: None)
"""Stands for the ``forward`` of the class, where the instance has none of its own."""

_CONTAINERS: Final = (list, dict, set, deque)

_DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a tensor in host memory.

    Attributes:
        data: its values; a dense layout is kept.
        device: the device of the original.
        requires_grad: whether the original took part in differentiation.
    """

    data: torch.Tensor
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Copy:
        """Copy a tensor; for a GPU tensor, wait until its values are there.

        Raises:
            UnsupportedError: the tensor is of a subclass, not strided, on another kind of device,
                or its memory was freed.
        """
        plain = type(tensor) in (torch.Tensor, Parameter) and tensor.layout is torch.strided
        if not plain or tensor.device.type not in _DEVICES:
            raise UnsupportedError(
                f"a {type(tensor).__name__} ({tensor.layout}, {tensor.device}) cannot be copied"
            )
        reach = (tensor.storage_offset() + meta_of(tensor).span) * tensor.element_size()
        if tensor.numel() and tensor.untyped_storage().nbytes() < reach:
            raise UnsupportedError("a tensor's memory has been taken away")  # as FSDP does
        data = tensor.detach().to("cpu", copy=True)
        return Copy(data, tensor.device, tensor.requires_grad)

    def fresh(self) -> torch.Tensor:
        """A new tensor on the original's device; the caller may change it."""
        return self.data.to(self.device, copy=True)

    def leaf(self) -> torch.Tensor:
        """A new leaf tensor; it requires gradients if the original did."""
        return self.fresh().requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class Randomness:
    """The states of the default random generators, which a forward may use."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: tuple[tuple[torch.device, torch.Tensor], ...]

    @staticmethod
    def now(gpus: frozenset[torch.device]) -> Randomness:
        """The current states, including those of these GPUs."""
        states = tuple((gpu, torch.cuda.get_rng_state(gpu)) for gpu in gpus)
        legacy = np.random.get_state()  # noqa: NPY002 - the user's code may use it
        return Randomness(random.getstate(), legacy, torch.get_rng_state(), states)

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        for gpu, state in self.cuda:
            torch.cuda.set_rng_state(state, gpu)


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one run.

    Attributes:
        outputs: outputs of forward; None for those that are not differentiable.
        gradients: gradients of inputs and parameters; None where there is none.
    """

    outputs: tuple[torch.Tensor | None, ...]
    gradients: tuple[torch.Tensor | None, ...]


class Call:
    """One call of one module. See Note [a call that is run again].

    Attributes:
        gradients: gradients of the outputs, by index of the output. Backward adds them.
    """

    def __init__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Args: module: the module that is about to be called with args and kwargs.

        Raises:
            UnsupportedError: an argument, a parameter or another tensor cannot be copied.
        """
        if not is_marked(module.__dict__.get("forward", _OWN)):
            raise UnsupportedError("its forward has been replaced on the instance")
        flat, self._spec = pytree.tree_flatten((args, dict(kwargs)))
        for value in flat:
            if not isinstance(value, (torch.Tensor, *_PLAIN)):
                raise UnsupportedError(f"it takes a {type(value).__name__}")
        self._inputs = [Copy.of(v) if isinstance(v, torch.Tensor) else v for v in flat]
        self._module = _replica(module)
        self._parameters = {
            name: None if p is None else Copy.of(p)
            for name, p in module._parameters.items()  # noqa: SLF001
        }
        self._buffers = {
            name: None if b is None else Copy.of(b)
            for name, b in module._buffers.items()  # noqa: SLF001
        }
        self._attributes = {
            name: Copy.of(v) for name, v in module.__dict__.items() if isinstance(v, torch.Tensor)
        }
        for name in self._attributes:  # they may hold the user's graph
            del self._module.__dict__[name]
        copies = [c for c in self._copies() if isinstance(c, Copy)]
        self._gpus = frozenset(c.device for c in copies if c.device.type == "cuda")
        self._randomness = Randomness.now(self._gpus)
        kinds = _DEVICES if self._gpus else _DEVICES[:1]
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]
        self.gradients: dict[int, Copy] = {}

    def _copies(self) -> Iterator[Any]:
        yield from self._inputs
        for group in (self._parameters, self._buffers, self._attributes):
            yield from group.values()

    def run(self, pack: Callable[[torch.Tensor], torch.Tensor]) -> Run:
        """Run forward and backward again.

        Args:
            pack: returns the tensor that backward gets in place of a saved tensor. It is not
                called for parameters.

        Raises:
            UnsupportedError: it takes part in a collective of several ranks. None was started.
        """
        with self._as_then(), without_collectives():
            module, targets, owned = self._fresh_module()
            leaves = [c.leaf() if isinstance(c, Copy) else c for c in self._inputs]
            targets += [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            # Clones, because forward may change its arguments in place, but not a leaf.
            flat = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(flat, self._spec)

            def pack_all_but(x: torch.Tensor) -> torch.Tensor:
                mine = x.untyped_storage()._cdata in owned  # noqa: SLF001
                x_detached = x if x.is_leaf else x.detach()  # an output must not own itself
                return x_detached if mine or reason_to_keep(x) else pack(x_detached)

            hooks = torch.autograd.graph.saved_tensors_hooks(pack_all_but, lambda x: x)
            with hooks, self._autocasting(as_then=True):
                outputs = differentiable(module.forward(*args, **kwargs))
            with self._autocasting(as_then=False):
                gradients = self._backward(outputs, targets)
            return Run(tuple(None if x is None else x.detach() for x in outputs), gradients)

    def _backward(
        self, outputs: tuple[torch.Tensor | None, ...], targets: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        arrived = [(outputs[i], g) for i, g in sorted(self.gradients.items()) if i < len(outputs)]
        pairs = [(out, g.fresh()) for out, g in arrived if out is not None]
        if not pairs or not targets:
            return ()
        return torch.autograd.grad(
            [out for out, _ in pairs], targets, [g for _, g in pairs], allow_unused=True
        )

    def _fresh_module(self) -> tuple[torch.nn.Module, list[torch.Tensor], frozenset[int]]:
        # Returns the module for one run, its tensors that need gradients, and all storages it owns.
        module, targets, storages = _replica(self._module), [], set()
        for name, kept in {**self._parameters, **self._buffers, **self._attributes}.items():
            value: torch.Tensor | None = None
            if kept is not None:
                value = kept.leaf()
                if name in self._parameters:
                    value = Parameter(value.detach(), requires_grad=kept.requires_grad)
                if value.requires_grad:
                    targets.append(value)
                storages.add(value.untyped_storage()._cdata)  # noqa: SLF001
            if name in self._attributes:
                module.__dict__[name] = value
            else:
                setattr(module, name, value)
        return module, targets, frozenset(storages)

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        with torch.inference_mode(mode=False), torch.enable_grad(), self._same_randomness():
            yield

    @contextmanager
    def _same_randomness(self) -> Iterator[None]:
        others = Randomness.now(self._gpus)
        self._randomness.restore()
        try:
            yield
        finally:
            others.restore()

    @contextmanager
    def _autocasting(self, *, as_then: bool) -> Iterator[None]:
        # The state of the call during forward. Off during backward, which has its own dtypes.
        with ExitStack() as stack:
            for kind, dtype, was_on in self._autocast:
                on = as_then and was_on
                # Without a cache, which would outlive the run.
                stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=False))
            yield


def differentiable(output: Any) -> tuple[torch.Tensor | None, ...]:
    """A module's outputs; None in place of an output that has no gradient."""
    flat, _ = pytree.tree_flatten(output)
    return tuple(x if isinstance(x, torch.Tensor) and x.requires_grad else None for x in flat)


def _replica(module: torch.nn.Module) -> torch.nn.Module:
    # A copy without parameters. `nn.DataParallel` uses the same protocol of modules.
    replica: torch.nn.Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]  # noqa: SLF001
    replica.__dict__ = without_patches(replica.__dict__)
    for name, value in replica.__dict__.items():
        if isinstance(value, _CONTAINERS):  # forward may append to its own list
            replica.__dict__[name] = copy.copy(value)
    return replica
