"""Checks every differentiable operator of PyTorch: gradients with swapping have the same bits.

Needs expecttest, as PyTorch's own operator tests do.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.api import swapping
from cswap.codecs.base import takes
from cswap.codecs.registry import compositions, get_codec, installed_codecs
from cswap.testing.buffers import fail_unless

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.engine.engine import SwapEngine

DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
"""Dtypes of the operators' inputs."""

SAMPLES: Final = 4
"""Samples per operator and dtype in a quick sweep."""

REPEATS: Final = 5
"""Runs without swapping after different gradients: an operator may not be repeatable."""

SKIPPED: Final = {
    # name, variant: why
    ("nn.functional.rrelu", ""): "saves its noise before writing it (pytorch#193671): H2",
}

_Gradients = list["tuple[tuple[int, ...], bytes] | None"]


@dataclass(slots=True)
class Swapped:
    """Counts of a sweep.

    Attributes:
        packed: saved tensors.
        tensors: swapped tensors.
    """

    packed: int = 0
    tensors: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One operator in one dtype.

    Attributes:
        op: PyTorch's OpInfo.
        dtype: dtype of its inputs.
    """

    op: Any
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.op.formatted_name}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def skipped(self) -> str | None:
        """The reason why it is not run, or None."""
        return SKIPPED.get((self.op.name, self.op.variant_test_name))


def operator_cases(device: str) -> list[Case]:
    """Every differentiable operator in every dtype that it takes on this kind of device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    return [
        Case(op, dtype)
        for op in op_db
        for dtype in DTYPES
        if op.supports_autograd and op.supports_dtype(dtype, device)
    ]


def one_case_each(device: str, dtypes: Sequence[torch.dtype] = DTYPES) -> list[Case]:
    """One of `operator_cases` per operator, in one of these dtypes, in turn over the operators."""
    wanted = [case for case in operator_cases(device) if case.dtype in dtypes]
    by_operator = [list(cases) for _, cases in groupby(wanted, lambda c: c.op)]
    return [cases[i % len(cases)] for i, cases in enumerate(by_operator)]


def lossless_codecs(device: str) -> tuple[str, ...]:
    """Lossless codecs, compositions included, that take floats or masks on this kind of device.

    nvCOMP's are left out: they have tests of their own.
    """
    lossless = [codec for codec in installed_codecs() if codec.lossless]
    kinds = (*DTYPES, torch.bool)
    names = (*(codec.name for codec in lossless), *compositions(lossless))
    return tuple(n for n in names if any(takes(get_codec(n), dtype, device) for dtype in kinds))


def rotating(names: Sequence[str], dtype: torch.dtype) -> Callable[[int], tuple[str, ...]]:
    """Codecs for a sample: "auto", and some of these names, such that `SAMPLES` samples use all."""
    offset, count = DTYPES.index(dtype), -(-len(names) // SAMPLES)

    def of_sample(index: int) -> tuple[str, ...]:
        first = count * index + offset
        return ("auto", *(names[(first + j) % len(names)] for j in range(count)))

    return of_sample


def check_operator(
    case: Case,
    device: str,
    codecs_of: Callable[[int], Sequence[str]],
    most_samples: int | None = None,
    n_steps: int = 1,
) -> Swapped:
    """Compare an operator's gradients with and without swapping, for samples of its inputs.

    Args:
        case: operator and dtype.
        device: device on which it runs.
        codecs_of: codecs to swap a sample with, by the sample's index.
        most_samples: largest number of samples; default: all.
        n_steps: how often each sample runs with one engine; it knows the call sites from the second
            on.

    Raises:
        AssertionError: a gradient's bits differ, or the engine took a slower path.
    """
    from torch.testing._internal.common_utils import set_rng_seed

    done = Swapped()
    set_rng_seed(0)
    # Not op.sample_inputs, which searches the interpreter's stack for a unittest. The search would
    # take three quarters of a sweep's time.
    samples = case.op.sample_inputs_func(case.op, device, case.dtype, True)
    for index, sample in enumerate(samples):
        if most_samples is not None and index >= most_samples:
            break
        try:
            expected = _gradients(case.op, sample)
            again = _gradients(case.op, sample)
        except (RuntimeError, NotImplementedError, ValueError, IndexError):
            continue  # an error sample, or nothing to differentiate, with and without cswap
        if expected is None or expected != again:
            continue  # not repeatable even without cswap
        for codec in codecs_of(index):
            with swapping(min_bytes=0, codec=codec) as engine:
                found = [_in_a_step(engine, case.op, sample) for _ in range(n_steps)]
            right = found == n_steps * [expected] or not _is_repeatable(case.op, sample, expected)
            fail_unless(right, f"{case}, sample {index}, codec {codec}: gradients differ")
            stats = engine.stats
            fail_unless(stats.fallbacks == 0, f"{case}: {stats.fallbacks_by_reason}")
            done.tensors += stats.swapped
            done.packed += stats.packed
    return done


def _in_a_step(engine: SwapEngine, op: Any, sample: Any) -> _Gradients | None:
    engine.begin_step()
    return _gradients(op, sample)


def _is_repeatable(op: Any, sample: Any, expected: _Gradients) -> bool:
    return all(_gradients(op, sample) == expected for _ in range(REPEATS))


def _gradients(op: Any, sample: Any) -> _Gradients | None:
    """Bits of the gradients of all inputs, or None if the operator cannot be run here."""
    _seed()
    outputs = _outputs_of(op(sample.input, *sample.args, **sample.kwargs))
    outputs = [t for t in outputs if t.is_floating_point() or t.is_complex()]
    leaves = _leaves_of(sample)
    if not outputs or not leaves:
        return None
    seeds = [torch.ones_like(t) for t in outputs]
    found: list[Any] = [*torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)]
    return [None if g is None else _bits(g) for g in found]  # None: that input was not used


def _seed() -> None:
    # Not torch.manual_seed, which records the stack for every kind of device that is missing.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


def _outputs_of(result: Any) -> list[torch.Tensor]:
    """Differentiable tensors anywhere in an operator's result."""
    if isinstance(result, torch.Tensor):
        return [result] if result.requires_grad else []
    if isinstance(result, tuple | list):
        return [t for part in result for t in _outputs_of(part)]
    return []


def _leaves_of(sample: Any) -> list[torch.Tensor]:
    arguments: list[Any] = [sample.input, *sample.args, *sample.kwargs.values()]
    flat: list[torch.Tensor] = []
    while arguments:
        a = arguments.pop(0)
        if isinstance(a, tuple | list):
            arguments = [*a, *arguments]
        elif isinstance(a, torch.Tensor) and a.requires_grad:
            flat.append(a)
    return flat


def _bits(x: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    """Shape and bits of any strided or sparse tensor."""
    if x.layout != torch.strided:
        x = x.to_dense()
    flat = x.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tuple(x.shape), flat.cpu().view(torch.uint8).numpy().tobytes()
