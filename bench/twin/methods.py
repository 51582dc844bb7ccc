"""The ways to train that the twin compares."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bench.twin.process import DEVICE
from bench.workloads import large_models

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from bench.twin.cuda import ClockedCuda
    from bench.workloads.large_models import BlockModel

PLAIN: Final = "plain"
PLANNED: Final = "plan"
"""A method that no table has: it needs a plan (`policies.py`)."""

CHECKPOINT: Final = "checkpoint"
SELECTIVE: Final = "selective checkpoint"
FIT: Final = "fit=checkpoint's peak"
DEVICE_GOAL: Final = 'fit="device"'

CSWAP: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    PLANNED: {"codec": "raw"},  # of tensors of which the plan names none
    "raw": {"codec": "raw"},
    "int8": {"lossy": "int8"},
    FIT: {},
    DEVICE_GOAL: {"fit": "device"},
}
"""Options of `cswap.install`, by method."""

METHODS: Final = (
    *(PLAIN, CHECKPOINT, SELECTIVE, "save_on_cpu", "TRL's offload"),
    *(method for method in CSWAP if method != PLANNED),
)

STASH: Final = 5
"""Tensors whose copies TRL lets be under way in forward."""

SMALLEST: Final = 1024
"""Elements below which TRL leaves a tensor."""

_PRODUCTS: Final = ("mm", "addmm", "bmm", "convolution", "_scaled_dot_product_flash_attention")


def around(method: str, cuda: ClockedCuda) -> AbstractContextManager[object]:
    """The context of a model's forward."""
    if method == "save_on_cpu":
        return save_on_cpu(pin_memory=True)
    if method == "TRL's offload":
        return Offload(cuda)
    return nullcontext()


def switch_on(method: str, model: BlockModel) -> None:
    """Let the model's blocks be checkpointed, where the method does that."""
    model.checkpointed = method in (CHECKPOINT, SELECTIVE)
    if method == SELECTIVE:
        contexts = partial(create_selective_checkpoint_contexts, _keeps_products)
        models: Any = large_models
        models.checkpoint = partial(models.checkpoint, context_fn=contexts)


def _keeps_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operator._opname in _PRODUCTS  # noqa: SLF001
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Offload(saved_tensors_hooks):
    """Copies as TRL's `OffloadActivations` with streams does: out beside forward, back when asked.

    A tensor is held until its copy has run, `STASH` of them; in backward the compute stream waits
    for each copy.
    """

    def __init__(self, cuda: ClockedCuda) -> None:
        """Args: cuda: the stand-in."""
        self._cuda = cuda
        self._side: Any = cuda.Stream()
        self._stash: deque[tuple[Any, Tensor]] = deque()
        super().__init__(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Any:
        if x.numel() < SMALLEST or isinstance(x, torch.nn.Parameter):
            return x
        cuda, side = self._cuda, self._side
        side.wait_stream(cuda.current_stream())
        if len(self._stash) >= STASH:
            event, _ = self._stash.popleft()
            cuda.current_stream().wait_event(event)
        with cuda.stream(side):
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            host.copy_(x, non_blocking=True)
        event = cuda.Event()
        event.record(side)
        self._stash.append((event, x))
        return (host,)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        cuda, side = self._cuda, self._side
        while self._stash:
            event, _ = self._stash.popleft()
            cuda.current_stream().wait_event(event)
        (host,) = packed
        with cuda.stream(side):
            x: Tensor = host.to(DEVICE, non_blocking=True)
        cuda.stream_now().wait_stream(side)
        cuda.record_stream(x, cuda.stream_now())
        return x
