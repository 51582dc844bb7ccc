"""Memory that a step needs besides saved tensors, and how a step's memory is measured."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

from cswap.ranks import local_part

if TYPE_CHECKING:
    from collections.abc import Iterable


class Resident:
    """Parameters, buffers, gradients and optimizer state of a model, until `remove`.

    The optimizer is known from its first step on: torch tells of every one.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Args: model: the model."""
        self._model = weakref.ref(model)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._counted: tuple[int, int] | None = None
        self._has_lazy = False  # parameters that have no sizes yet
        me = weakref.ref(self)  # torch holds its hooks for ever

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            resident = me()
            if resident is not None:
                resident.note(optimizer)

        self._hook = register_optimizer_step_post_hook(note)
        weakref.finalize(self, self._hook.remove)

    @property
    def nbytes(self) -> int:
        """Bytes of all of these; gradients count whether they are there at the moment or not."""
        # Counted anew only where an optimizer has made states: it is asked for in every step.
        count = sum(len(optimizer.state) for optimizer in self._optimizers)
        if self._counted is None or self._counted[0] != count or self._has_lazy:
            self._counted = count, self._count()
        return self._counted[1]

    def _count(self) -> int:
        model = self._model()
        if model is None:
            return 0
        parameters = list(model.parameters())
        self._has_lazy = any(map(is_lazy, parameters))
        mine = set(parameters)
        states = (
            x
            for optimizer in list(self._optimizers)
            for p, state in list(optimizer.state.items())
            if p in mine
            for x in _tensors(state)
        )
        gradients = sum(
            local_part(p).nbytes for p in parameters if p.requires_grad and not is_lazy(p)
        )
        return gradients + _bytes_of((*parameters, *model.buffers(), *states))

    def remove(self) -> None:
        """Hear of optimizers no longer."""
        self._hook.remove()

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""
        if optimizer in self._optimizers:
            return
        model = self._model()
        mine = set() if model is None else set(model.parameters())
        if any(p in mine for group in optimizer.param_groups for p in group["params"]):
            self._optimizers.add(optimizer)


def _tensors(state: Any) -> list[torch.Tensor]:
    values = state.values() if isinstance(state, dict) else ()
    return [x for x in values if isinstance(x, torch.Tensor)]


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    # Each storage once: parameters may be tied.
    parts = [part for x in tensors for part in _parts(local_part(x))]
    storages = [part.untyped_storage() for part in parts]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # The strided tensors of which a sparse one is made; none of a lazy module's parameter.
    if is_lazy(x):
        return ()
    if x.layout is torch.sparse_coo:  # which may not be coalesced
        return x._indices(), x._values()  # noqa: SLF001
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    return (x,)


class Meter(Protocol):
    """Measures a step's memory.

    Attributes:
        by: how, in words.
    """

    by: str

    def take(self, saved_bytes: int) -> int:
        """Most bytes since this was called last.

        Args:
            saved_bytes: of saved tensors, at their peak in that time.
        """
        ...

    def lap(self) -> int:
        """Most bytes since this or `take` was called last; 0 where that is not known."""
        ...


class CountedMeter:
    """Saved and resident bytes: for a CPU, where torch has no peak to ask for."""

    by = "saved bytes plus parameters, buffers, gradients and optimizer state"

    def __init__(self, resident: Resident) -> None:
        """Args: resident: of the model."""
        self._resident = resident

    def take(self, saved_bytes: int) -> int:
        """See `Meter`."""
        return self._resident.nbytes + saved_bytes

    def lap(self) -> int:
        """See `Meter`."""
        return 0


class AllocatorMeter:
    """The peak of torch's CUDA allocator. Its statistics begin anew with every step."""

    by = "the peak of the CUDA allocator"

    def __init__(self, device: torch.device) -> None:
        """Args: device: of the model."""
        self._device = device
        self._most = 0  # of the laps

    def take(self, saved_bytes: int) -> int:
        """See `Meter`; saved tensors are part of the peak."""
        most, self._most = max(self.lap(), self._most), 0
        return most

    def lap(self) -> int:
        """See `Meter`."""
        peak = int(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        self._most = max(self._most, peak)
        return peak


def meter_for(device: torch.device, resident: Resident) -> Meter:
    """The meter of a model on this device."""
    return AllocatorMeter(device) if device.type == "cuda" else CountedMeter(resident)
