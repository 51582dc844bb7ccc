"""The CUDA kernels' PTX in the interpreter, against the CPU twins: bytes, words, races, bounds."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

pytest.importorskip("numba.cuda.extending", reason="numba-cuda is not installed")

from bench.ptx import check as checking
from bench.ptx.damage import damaged
from bench.ptx.device import Kernels
from bench.ptx.runs import TARGETS, Effort, check

USUAL = Effort(full=True, shapes=False, damage=1, only=("sparse 60",))
"""By default; all data, shapes and damage with the slow tests. Full, or else only every fourth case
looks for races, and this one is not among them."""

ALONE = [name for name in TARGETS if "+" not in name and ":" not in name]
"""Formats that every kernel is made of; what compositions add is what `TOGETHER` adds."""

TOGETHER = "zvc+int8"
"""Its kernels compile faster than those of zvc+expk. The slow tests run all compositions."""

QUICK = ("bitpack",)
"""Formats that `make test` runs; two kernels of each of the others take seconds to compile."""

USUALLY = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in (*ALONE, TOGETHER)
]

EVERY = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, dtypes in TARGETS.items()
    for dtype in dtypes
]


@pytest.fixture(scope="module")
def kernels():
    """Of the architecture that has all instructions that the kernels choose from."""
    return Kernels(90)


@pytest.mark.parametrize("name", USUALLY)
def test_twins_agree(kernels, name, monkeypatch):
    # A third of the kinds of damage per format, in turn; all kinds with the slow tests.
    first = ALONE.index(name) % 3 if name in ALONE else 0
    monkeypatch.setattr(checking, "damaged", lambda *args: islice(damaged(*args), first, None, 3))
    found = check(kernels, name, TARGETS[name][0], USUAL)
    assert found.failures == []
    assert found.round_trips == len(USUAL.only)
    assert found.damaged > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALONE, TOGETHER])
def test_twins_agree_on_damage_of_every_kind(kernels, name):
    found = check(kernels, name, TARGETS[name][0], USUAL)
    assert found.failures == []
    assert found.damaged > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_twins_agree_on_all_data(kernels, name, dtype):
    found = check(kernels, name, dtype)
    assert found.failures == []
    assert found.round_trips > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("int8", torch.float32), ("fp8", torch.bfloat16)])
def test_twins_agree_on_the_oldest_architecture(name, dtype):
    found = check(Kernels(75), name, dtype, USUAL)
    assert found.failures == []


@pytest.mark.slow
def test_a_broken_kernel_is_noticed():
    kernels = Kernels(90)
    text = kernels.ptx("zvc-2-encode")
    kernels.replace("zvc-2-encode", text.replace("bar.sync \t0;", "", 1))
    assert "bar.sync" in text
    assert check(kernels, "zvc", torch.bfloat16, USUAL).failures
