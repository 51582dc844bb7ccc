"""Every differentiable operator: gradients with swapping are the gradients without, bit for bit.

``make test`` runs each operator in each dtype once per group of codecs, the codecs rotating over
the operator's samples so that every operator meets every lossless codec; the full product of
operators, dtypes, samples and codecs is marked slow.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import cswap
from cswap.errors import CswapError

pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
CODECS = ("auto", "raw", "zvc", "csr", "rle", "expk", "bitpack", "zvc+expk", "lz4", "zstd")
SAMPLES = 4
"""Per operator and dtype in the quick sweep."""

SKIPPED = {
    # name, variant: why
    ("nn.functional.rrelu", ""): "saves its noise before writing it (pytorch#193671): H2",
}

CASES = [
    pytest.param(op, dtype, id=f"{op.formatted_name}-{str(dtype).removeprefix('torch.')}")
    for op in op_db
    for dtype in DTYPES
    if op.supports_autograd and op.supports_dtype(dtype, "cpu")
]

swapped = {"tensors": 0, "packed": 0}


def available(name):
    try:
        return name == "auto" or cswap.get_codec(name) is not None
    except CswapError:
        return False


def outputs_of(result):
    """Differentiable tensors anywhere in an operator's result."""
    if isinstance(result, torch.Tensor):
        return [result] if result.requires_grad else []
    if isinstance(result, tuple | list):
        return [t for part in result for t in outputs_of(part)]
    return []


def leaves_of(sample):
    arguments = [sample.input, *sample.args, *sample.kwargs.values()]
    flat = []
    while arguments:
        a = arguments.pop(0)
        if isinstance(a, tuple | list):
            arguments = [*a, *arguments]
        elif isinstance(a, torch.Tensor) and a.requires_grad:
            flat.append(a)
    return flat


def gradients(op, sample):
    """Bits of the gradients of all inputs, or None if the operator cannot be run here."""
    torch.manual_seed(0)
    outputs = outputs_of(op(sample.input, *sample.args, **sample.kwargs))
    outputs = [t for t in outputs if t.is_floating_point() or t.is_complex()]
    leaves = leaves_of(sample)
    if not outputs or not leaves:
        return None
    seeds = [torch.ones_like(t) for t in outputs]
    found = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
    return [None if g is None else bits(g) for g in found]


def bits(x):
    """Shape and bits of any strided or sparse tensor."""
    if x.layout != torch.strided:
        x = x.to_dense()
    flat = x.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tuple(x.shape), flat.view(torch.uint8).numpy().tobytes()


def check(op, dtype, codecs_of, most_samples):
    samples = iter(op.sample_inputs("cpu", dtype, requires_grad=True))
    for index, sample in enumerate(samples):
        if most_samples is not None and index >= most_samples:
            return
        try:
            expected = gradients(op, sample)
            again = gradients(op, sample)
        except (RuntimeError, NotImplementedError, ValueError):
            continue  # an error sample, or nothing to differentiate: the same without cswap
        if expected is None or expected != again:
            continue  # not repeatable even without cswap
        for codec in codecs_of(index):
            with cswap.swapping(min_bytes=0, codec=codec, workers=index % 2) as engine:
                found = gradients(op, sample)
            assert found == expected, f"sample {index}, codec {codec}"
            stats = engine.stats
            assert stats.fallbacks == 0, stats.fallbacks_by_reason
            swapped["tensors"] += stats.swapped
            swapped["packed"] += stats.packed


def variant(op):
    return op.name, op.variant_test_name


NAMES = tuple(c for c in CODECS if available(c))


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_gradients_are_bit_equal(op, dtype):
    if variant(op) in SKIPPED:
        pytest.skip(SKIPPED[variant(op)])
    offset = DTYPES.index(dtype)

    def rotating(index):
        # auto always; of the others each sample takes three, all of them over four samples
        others = NAMES[1:]
        return ("auto", *(others[(3 * index + offset + j) % len(others)] for j in range(3)))

    check(op, dtype, rotating, SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_gradients_are_bit_equal_in_the_full_product(op, dtype):
    if variant(op) in SKIPPED:
        pytest.skip(SKIPPED[variant(op)])
    check(op, dtype, lambda _: NAMES, None)


def test_the_sweep_has_really_swapped():
    assert not swapped["packed"] or swapped["tensors"] > 0.1 * swapped["packed"]
