"""Runs one training step under a recorder, with fake or real tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cswap.errors import TraceError
from cswap.plan.tracing.operators import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cswap.plan.tracing.recorder import Recorder


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Arguments as a tuple; a value that is neither a tuple nor a list is the only argument.

    Raises:
        TraceError: one of them is an array of another library.
    """
    found = tuple(value) if isinstance(value, tuple | list) else (value,)
    for one in found:
        if hasattr(one, "__array_interface__"):
            raise TraceError(
                f"argument={type(one).__name__}: must be a torch.Tensor; see torch.from_numpy."
            )
    return found


def run_step(
    recorder: Recorder,
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    loss: Callable[..., torch.Tensor],
    targets: tuple[Any, ...],
    *,
    swap_loss: bool,
) -> None:
    """Run forward, loss and backward. Gradients must be None before; afterwards they are set."""
    _name_inputs(recorder, "input", inputs)
    _name_inputs(recorder, "target", targets)
    with recorder, recorder.paths(model):
        with recorder.saving():
            output = model(*inputs)
            value = loss(output, *targets) if swap_loss else None
        if value is None:
            value = loss(output, *targets)
        del output
        recorder.phase = "backward"
        # Backward must run in this thread, because the recorder sees only this thread.
        with torch.autograd.set_multithreading_enabled(False):
            value.backward()  # type: ignore[no-untyped-call]
    recorder.phase = "optimizer"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            recorder.name(parameter.grad, f"{name}.grad", "gradient")


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Dense gradients of the model's parameters."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [gradient for gradient in found if gradient.layout is torch.strided]


def batch_of(inputs: tuple[Any, ...]) -> int:
    """Number of samples: the first extent of the first tensor, or 0 if there is none."""
    tensors = [t for t in tensors_in(inputs) if t.ndim]
    return int(tensors[0].shape[0]) if tensors else 0


def resident_bytes(model: torch.nn.Module, more: list[torch.Tensor] | None = None) -> int:
    """Bytes of parameters, buffers and the tensors in ``more``; each storage counts once."""
    return storage_bytes([*model.parameters(), *model.buffers(), *(more or [])])


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that tensors hold; each storage counts once."""
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}  # noqa: SLF001
    return sum(storages.values())


def _name_inputs(recorder: Recorder, name: str, values: tuple[Any, ...]) -> None:
    for index, tensor in enumerate(tensors_in(values)):
        recorder.name(tensor, f"{name}.{index}", "input")
