"""Every differentiable operator with more codecs, dtypes and samples than in `test_opinfo.py`.

Not collected where slow tests are deselected, see `pytest_ignore_collect` in conftest.py.
"""

from __future__ import annotations

import pytest

from cswap.advisor.advisor import Advisor
from tests.engine import operators

pytest.importorskip("expecttest", reason="PyTorch's operator tests need expecttest")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

CASES = operators.operator_cases("cpu")
ONE_EACH = operators.one_case_each("cpu")

CODECS = operators.lossless_codecs("cpu")


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_gradients_are_bit_equal_with_every_codec(case):
    skip(case)
    codecs_of = operators.rotating(CODECS, case.dtype)
    operators.check_operator(case, "cpu", codecs_of, operators.SAMPLES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_bit_equal_in_the_full_product(case):
    skip(case)
    operators.check_operator(case, "cpu", lambda _: ("auto", *CODECS))


@pytest.mark.parametrize("case", ONE_EACH, ids=str)
def test_gradients_are_bit_equal_if_all_that_can_be_is_computed_again(case, monkeypatch):
    skip(case)
    monkeypatch.setattr(Advisor, "pays_again", lambda *_, **__: True)
    operators.check_operator(case, "cpu", lambda _: ("raw",), n_steps=3)  # by slots, too


def skip(case):
    """Skip an operator that is not run."""
    if case.skipped:
        pytest.skip(case.skipped)
