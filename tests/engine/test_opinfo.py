"""Every differentiable operator: gradients with swapping are the gradients without, bit for bit.

``make test`` runs every second operator in one of the dtypes of `QUICK`, in turn over the
operators; the slow tests run the others, too. Each sample meets one codec, and one of the first two
"auto", too; the codecs rotate over samples and operators. `test_opinfo_sweeps.py` has the other
combinations, and a test for each operator.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.engine import operators

pytest.importorskip("expecttest", reason="PyTorch's operator tests need expecttest")

pytestmark = pytest.mark.filterwarnings("ignore")

PARTS = 32
SLOW = (
    "combinations",
    *("float_power", "softmax_with_dtype", "log_softmax_with_dtype"),
    "nn_functional_softmin_with_dtype",
)
"""Left to the sweeps: an operator whose samples take seconds, and those that save float64 of other
dtypes (see `QUICK`)."""

CODECS = operators.lossless_codecs("cpu")
QUICK = (torch.float32, torch.bfloat16, torch.complex64)
"""No float64: it takes kernels of all codecs that no other quick test needs."""


@cache
def cases():
    """One per operator. Torch's list of operators takes seconds to import: not at collection."""
    return operators.one_case_each("cpu", QUICK)


@pytest.mark.parametrize(
    "part", [pytest.param(n, marks=pytest.mark.slow if n % 2 else ()) for n in range(PARTS)]
)
def test_gradients_are_bit_equal(part):
    swept = operators.Swapped()
    for number in range(part, len(cases()), PARTS):
        case = cases()[number]
        if case.skipped or case.op.formatted_name in SLOW:
            continue

        def codecs_of(sample, number=number):
            codec = CODECS[(number + sample) % len(CODECS)]
            return ("auto", codec) if sample == number % 2 else (codec,)

        done = operators.check_operator(case, "cpu", codecs_of, operators.SAMPLES)
        swept.packed += done.packed
        swept.tensors += done.tensors
    assert swept.packed
    assert swept.tensors > 0.1 * swept.packed  # they have really swapped


@pytest.mark.parametrize("dtype", operators.DTYPES, ids=str)
def test_the_samples_of_a_quick_sweep_use_every_codec(dtype):
    codecs_of = operators.rotating(CODECS, dtype)
    of_samples = [codecs_of(sample) for sample in range(operators.SAMPLES)]
    assert all(codecs[0] == "auto" for codecs in of_samples)
    assert {*CODECS} == {codec for codecs in of_samples for codec in codecs[1:]}
