"""Note [inner functions]: compiled callers link them; a call from Python compiles them in full."""

from __future__ import annotations

import numpy as np
import pytest

from cswap_kernels import inner_functions
from cswap_kernels.jit import njit


def make():
    """A kernel, a kernel that calls it, and one that calls that."""

    @njit(nogil=True)
    def half(x, i):
        if x[i] < 0:
            raise ValueError("negative")
        return x[i] / 2

    @njit(nogil=True)
    def halves(x):
        total = 0.0
        for i in range(len(x)):
            total += half(x, i)
        return total

    @njit(nogil=True)
    def twice(x):
        return halves(x) + halves(x)

    return half, halves, twice


X = np.arange(5.0)


@pytest.mark.parametrize("supported", [True, False])
def test_a_call_from_python_compiles_only_its_own_function_in_full(monkeypatch, supported):
    monkeypatch.setattr(inner_functions, "SUPPORTED", supported)
    half, halves, twice = make()
    assert twice(X) == 10
    in_full = [len(kernel.overloads) for kernel in (half, halves, twice)]
    assert in_full == [not supported, not supported, 1]


def test_an_inner_function_has_no_machine_code_of_its_own():
    half, halves, twice = make()
    assert twice(X) == 10
    for kernel in (half, halves):
        (made,) = kernel.get_call_template.__self__.overloads.values()
        engine = made.library.codegen._engine
        assert not engine.is_symbol_defined(made.fndesc.mangled_name)
    (made,) = twice.overloads.values()
    assert engine.is_symbol_defined(made.fndesc.mangled_name)


def test_python_and_compiled_callers_use_a_kernel_side_by_side():
    half, halves, twice = make()
    assert half(X, 3) == 1.5
    assert twice(X) == 10
    assert half(X, 4) == 2
    assert halves(X) == 5
    assert half(X.astype(np.float32), 1) == 0.5
    assert halves(X.astype(np.float32)) == 5


def test_an_error_in_an_inner_function_reaches_python():
    with pytest.raises(ValueError, match="negative"):
        make()[2](-X)
