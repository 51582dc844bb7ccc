"""Every differentiable operator on a GPU: with swapping, gradients have the same bits."""

from __future__ import annotations

import pytest

from cswap.testing import operators

pytest.importorskip("expecttest", reason="PyTorch's operator tests need expecttest")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

CASES = operators.operator_cases("cuda")
swept = operators.Swapped()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_bit_equal(case, device):
    if case.skipped:
        pytest.skip(case.skipped)
    codecs = operators.rotating(operators.lossless_codecs("cuda"), case.dtype)
    done = operators.check_operator(case, str(device), codecs, operators.SAMPLES)
    swept.packed += done.packed
    swept.tensors += done.tensors


def test_the_sweep_has_really_swapped():
    assert not swept.packed or swept.tensors > 0.1 * swept.packed
