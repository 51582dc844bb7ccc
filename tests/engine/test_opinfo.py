"""Every differentiable operator: gradients with swapping are the gradients without, bit for bit.

``make test`` runs each operator in one of its dtypes, the dtypes in turn over the operators. Each
sample meets one codec, and one of the first two "auto", too; the codecs rotate over samples and
operators. In the slow tests, every operator meets every lossless codec in those samples, too. The
full product of operators, dtypes, samples and codecs is marked slow.
"""

from __future__ import annotations

from itertools import groupby

import pytest

from cswap.advisor.advisor import Advisor
from cswap.testing import operators

pytest.importorskip("expecttest", reason="PyTorch's operator tests need expecttest")

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = operators.operator_cases("cpu")
ONE_DTYPE = [
    (by_dtype := list(cases))[i % len(by_dtype)]
    for i, (_, cases) in enumerate(groupby(CASES, key=lambda case: case.op))
]
"""One case per operator."""

CODECS = operators.lossless_codecs("cpu")
swept = operators.Swapped()


@pytest.mark.parametrize("number", range(len(ONE_DTYPE)), ids=[str(case) for case in ONE_DTYPE])
def test_gradients_are_bit_equal(number):
    def codecs_of(sample):
        codec = CODECS[(number + sample) % len(CODECS)]
        return ("auto", codec) if sample == number % 2 else (codec,)

    check(ONE_DTYPE[number], codecs_of)


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE_DTYPE, ids=str)
def test_gradients_are_bit_equal_with_every_codec(case):
    check(case, operators.rotating(CODECS, case.dtype))


def check(case, codecs_of):
    """The first samples of an operator."""
    if case.skipped:
        pytest.skip(case.skipped)
    done = operators.check_operator(case, "cpu", codecs_of, operators.SAMPLES)
    swept.packed += done.packed
    swept.tensors += done.tensors


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_bit_equal_in_the_full_product(case):
    if case.skipped:
        pytest.skip(case.skipped)
    operators.check_operator(case, "cpu", lambda _: ("auto", *CODECS))


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE_DTYPE, ids=str)
def test_gradients_are_bit_equal_if_all_that_can_be_is_computed_again(case, monkeypatch):
    if case.skipped:
        pytest.skip(case.skipped)
    monkeypatch.setattr(Advisor, "recomputes", lambda *_: True)
    operators.check_operator(case, "cpu", lambda _: ("raw",))


@pytest.mark.parametrize("dtype", operators.DTYPES, ids=str)
def test_the_samples_of_a_quick_sweep_use_every_codec(dtype):
    codecs_of = operators.rotating(CODECS, dtype)
    of_samples = [codecs_of(sample) for sample in range(operators.SAMPLES)]
    assert all(codecs[0] == "auto" for codecs in of_samples)
    assert {*CODECS} == {codec for codecs in of_samples for codec in codecs[1:]}


def test_the_sweep_has_really_swapped():
    assert not swept.packed or swept.tensors > 0.1 * swept.packed
