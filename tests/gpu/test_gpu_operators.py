"""Every differentiable operator on a GPU: with swapping, gradients have the same bits."""

from __future__ import annotations

import os

import pytest
import torch

from tests.engine import operators

pytest.importorskip("expecttest", reason="PyTorch's operator tests need expecttest")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

# Read by cuBLAS when its first handle is made; without it, there is no deterministic product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

CASES = operators.operator_cases("cuda")
swept = operators.Swapped()


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Sums of atomic additions differ now and then; operators that have no other way are left out,
    since they raise."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


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
