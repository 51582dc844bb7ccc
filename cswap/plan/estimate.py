"""Estimates a trace without a run: shapes from fake tensors, durations from a roofline model.

The estimate allocates no memory and computes no values, so a laptop traces a step of 30 GB in
seconds. The operators are those that torch would run. Under ``device="cuda"``, dropout and
attention are torch's fused operators. Choices that torch makes only on a real GPU are not
reproduced: batch norm and LSTM layers use torch's own operators, not cuDNN's.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses import fake_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cswap.config import MIN_BYTES
from cswap.errors import TraceError
from cswap.plan.hardware import load_hardware
from cswap.plan.tracing.assemble import assemble
from cswap.plan.tracing.recorder import Recorder
from cswap.plan.tracing.step import (
    as_tuple,
    batch_of,
    gradients,
    resident_bytes,
    run_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.plan.hardware import Hardware
    from cswap.plan.tracing.recorder import RecordedOperator
    from cswap.schema.trace import Trace

LAUNCH_S: Final = 4e-6
"""Seconds added to every operator for the start of a kernel and the gap before the next, on a
GPU."""

OPTIMIZERS: Final = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Number of state tensors per parameter, by name of the optimizer."""

_NEEDS_VALUES: Final = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)


def estimate(
    model: torch.nn.Module,
    inputs: Any,
    loss: Callable[..., torch.Tensor],
    targets: Any = (),
    *,
    hardware: Any,
    optimizer: str = "sgd",
    device: str = "cuda",
    min_bytes: int | None = None,
    swap_loss: bool = False,
    launch_s: float = LAUNCH_S,
    name: str = "",
) -> Trace:
    """Estimate the trace of one training step.

    Args:
        model: any module on any device, also the meta device. It is not changed.
        inputs: one batch: a tensor or a tuple of arguments. Only shapes and dtypes matter.
        loss: called as ``loss(output, *targets)``; returns a scalar.
        targets: a tensor or a tuple.
        hardware: any argument of `load_hardware`; the durations are for this machine.
        optimizer: one of `OPTIMIZERS`. It is one fused operator at the end of the step, and its
            state is resident. ``none``: there is no state, but gradients still live until the end.
        device: ``cuda`` or ``cpu``; sets the operators and the defaults.
        min_bytes: bytes of the smallest saved tensor that gets a position. It must equal the
            setting of the engine that runs the plan; default: the engine's default for the device.
        swap_loss: whether tensors that the loss function saves get positions, too. They do under
            ``cswap.install()``, and they do not under ``cswap.install(model)``.
        launch_s: seconds added to every operator.
        name: name of the trace; default: the model's class.

    Raises:
        TraceError: an option is wrong, or the step reads values, which fake tensors lack.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> trace = estimate(model, torch.empty(2, 8), torch.sum, hardware="v100-pcie3", min_bytes=0)
    >>> [operator.name for operator in trace.operators if operator.phase == "forward"]
    ['0.addmm', '1.relu', 'sum']
    """
    for option, value, known in (
        ("optimizer", optimizer, (*OPTIMIZERS,)),
        ("device", device, (*MIN_BYTES,)),
    ):
        if value not in known:
            raise TraceError(f"{option}={value!r}: must be one of {', '.join(known)}.")
    machine = load_hardware(hardware)
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        fake_model = _fake_copy(model)
        fake_inputs, fake_targets = _fake((as_tuple(inputs), as_tuple(targets)))
        recorder = Recorder(
            [*fake_model.buffers(), *fake_model.parameters()],
            min_bytes=MIN_BYTES[device] if min_bytes is None else min_bytes,
        )
        try:
            with _OperatorsOf(device):
                run_step(recorder, fake_model, fake_inputs, loss, fake_targets, swap_loss=swap_loss)
        except _NEEDS_VALUES as error:
            raise TraceError(
                f"model={type(model).__name__}: this step depends on the values of tensors "
                f"({error}), which an estimate lacks. Measure it instead."
            ) from error
        # An update reads parameter, gradient and state, and writes parameter and state.
        n_accesses = 3 + 2 * OPTIMIZERS[optimizer] if optimizer != "none" else 0
        grads = gradients(fake_model)
        grad_bytes = sum(g.nbytes for g in grads)
        recorder.add("optimizer", grads, n_accesses * grad_bytes)
        resident = resident_bytes(fake_model) + OPTIMIZERS[optimizer] * grad_bytes
    return assemble(
        recorder,
        [duration_s(operator, machine, launch_s) for operator in recorder.operators],
        resident_bytes=resident,
        name=name or type(model).__name__,
        batch=batch_of(fake_inputs),
        source="estimated",
        hardware=machine.name,
    )


def duration_s(operator: RecordedOperator, hardware: Hardware, launch_s: float) -> float:
    """Seconds by the roofline: the longer of arithmetic and memory traffic, plus the launch."""
    if operator.kind == "optimizer" and not operator.bytes_moved:
        return 0.0
    rate = hardware.flops.get(operator.dtype) or hardware.flops["float32"]
    arithmetic_s = operator.flops / rate.achievable
    return max(arithmetic_s, operator.bytes_moved / hardware.memory_bytes_per_s) + launch_s


def _fake(value: Any) -> Any:
    """Copy a nested value with fake tensors; a tensor that occurs twice stays one tensor."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _fake_tensor(tensor)
        return made[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, fake, value)


def _fake_tensor(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return fake.requires_grad_(tensor.requires_grad)


def _fake_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Copy the model with fake parameters and buffers; tied parameters stay tied."""
    memo: dict[int, Any] = {id(b): _fake_tensor(b) for b in model.buffers()}
    for parameter in model.parameters():
        fake = _fake_tensor(parameter.detach())
        memo[id(parameter)] = torch.nn.Parameter(fake, parameter.requires_grad)
    return copy.deepcopy(model, memo)


class _OperatorsOf(TorchFunctionMode):
    """Selects the operators that torch runs on a device, though the fake tensors are on a CPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._is_cuda = device == "cuda"

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or the operator that replaces it on a GPU."""
        kwargs = kwargs or {}
        if self._is_cuda and func is functional.dropout:
            return _dropout(*args, **kwargs)
        if self._is_cuda and func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or not 0 < p < 1 or inplace:
        return functional.dropout(x, p, training, inplace)
    out: torch.Tensor = torch.native_dropout(x, p, True)[0]
    return out


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Flash attention for half precision, memory-efficient attention for the rest."""
    scale = options.get("scale")
    fits = q.ndim == 4 and q.shape[-1] % 8 == 0 and not options.get("enable_gqa", False)
    if not fits or attn_mask is not None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, **options
        )
    aten = torch.ops.aten
    out: torch.Tensor
    if q.dtype in (torch.float16, torch.bfloat16):
        out = aten._scaled_dot_product_flash_attention(  # noqa: SLF001
            q, k, v, dropout_p, is_causal, scale=scale
        )[0]
    else:
        out = aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
            q, k, v, None, True, dropout_p, is_causal, scale=scale
        )[0]
    return out
