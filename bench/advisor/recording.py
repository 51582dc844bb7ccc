"""The tensors that autograd saves in one step of a model that has trained a little."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from bench.advisor.models import advisor_task
from bench.codecs.recorded import WARM_STEPS, train

if TYPE_CHECKING:
    from torch import Tensor

MIN_BYTES: Final = 64 << 10
"""The engine's default on a CPU."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One saved tensor.

    Attributes:
        x: its elements, [n] flat, a copy.
        forward_share: share of forward's time until the next tensor is saved.
    """

    x: Tensor
    forward_share: float


@dataclass(frozen=True, slots=True)
class Recording:
    """A step.

    Attributes:
        model: name of its task.
        tensors: its saved tensors without parameters and small tensors, each storage once.
        forward_flops: floating-point operations of forward.
    """

    model: str
    tensors: tuple[Saved, ...]
    forward_flops: float

    @property
    def nbytes(self) -> int:
        """Raw bytes of all tensors."""
        return sum(saved.x.nbytes for saved in self.tensors)


def record(model: str, *, quick: bool) -> Recording:
    """Train the task's model a little, then record a step of it."""
    task = advisor_task(model, quick=quick, n_steps=WARM_STEPS)
    net = train(task, quick=quick)
    inputs, targets = task.batch(0, task.n_steps)
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(net(inputs), targets)
    owned = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers())}
    seen: set[tuple[int, int]] = set()
    found: list[tuple[Tensor, float]] = []
    held = []  # storages are told apart by their addresses, which must not be used again

    def pack(x: Tensor) -> Tensor:
        held.append(x)
        storage = x.untyped_storage()
        key = (storage.data_ptr(), x._version)  # noqa: SLF001
        if x.nbytes >= MIN_BYTES and storage.data_ptr() not in owned and key not in seen:
            seen.add(key)
            whole = torch.empty(0, dtype=x.dtype).set_(storage)
            found.append((whole.clone(), time.perf_counter()))
        return x

    start = time.perf_counter()
    with saved_tensors_hooks(pack, lambda x: x):
        functional.cross_entropy(net(inputs), targets)
    end = time.perf_counter()
    times = [at for _, at in found] + [end]
    shares = [(b - a) / (end - start) for a, b in itertools.pairwise(times)]
    tensors = tuple(Saved(x, share) for (x, _), share in zip(found, shares, strict=True))
    return Recording(model, tensors, float(counter.get_total_flops()))
