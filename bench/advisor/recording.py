"""The tensors that autograd saves in one step of a model that has trained a little."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from bench.advisor.models import advisor_task
from bench.codecs.recorded import WARM_STEPS, train

if TYPE_CHECKING:
    from torch import Tensor

MIN_BYTES: Final = 64 << 10
"""The engine's default on a CPU."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A step.

    Attributes:
        model: name of its task.
        tensors: elements of its saved tensors, [n] flat, copies; parameters and small tensors left
            out, each storage once.
    """

    model: str
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Raw bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors)


def record(model: str, *, quick: bool) -> Recording:
    """Train the task's model a little, then record a step of it."""
    task = advisor_task(model, quick=quick, n_steps=WARM_STEPS)
    net = train(task, quick=quick)
    inputs, targets = task.batch(0, task.n_steps)
    owned = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers())}
    seen: set[tuple[int, int]] = set()
    found: list[Tensor] = []
    held = []  # storages are told apart by their addresses, which must not be used again

    def pack(x: Tensor) -> Tensor:
        held.append(x)
        storage = x.untyped_storage()
        key = (storage.data_ptr(), x._version)  # noqa: SLF001
        if x.nbytes >= MIN_BYTES and storage.data_ptr() not in owned and key not in seen:
            seen.add(key)
            whole = torch.empty(0, dtype=x.dtype).set_(storage)
            found.append(whole.clone())
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        functional.cross_entropy(net(inputs), targets)
    return Recording(model, tuple(found))
