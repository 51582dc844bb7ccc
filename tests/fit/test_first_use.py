"""On a machine that has compiled nothing, steps run without cswap until a process has done it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap.codecs import first_use
from tests.fit.test_default_on_a_cpu import equal, gradients, perceptron, squared, train


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty folder for the marks of compiled kernels."""
    monkeypatch.setenv("CSWAP_CALIBRATE", "1")
    monkeypatch.setattr(first_use, "numba_folder", lambda: tmp_path)
    monkeypatch.setattr("cswap.advisor.background_calibration.start_once", lambda _kind: None)
    return tmp_path


def program(monkeypatch, text):
    """Let the process run this program in place of the one that compiles."""
    monkeypatch.setattr(first_use, "PROGRAM", text)


@pytest.fixture
def waiting(monkeypatch, folder):
    """The process waits until the file is there."""
    gate = folder / "gate"
    program(
        monkeypatch,
        f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n",
    )
    return gate


def wait(handle):
    compiling = handle._fit._first_use._compiling
    compiling._process.wait()


def test_steps_run_without_cswap_until_the_kernels_are_there(waiting, folder, caplog):
    model, x = perceptron(256), torch.randn(256, 256, requires_grad=True)
    loss, wanted = squared(model, x)
    with cswap.install(model) as handle:
        for _ in range(3):
            assert equal(gradients(model, loss), wanted)
            goal: Any = handle.goal
            assert goal.phase == "compiling"
        assert handle.stats.packed == 0
        assert str(handle).endswith("steps run without cswap")
        assert "beside the training" in caplog.text
        waiting.touch()
        wait(handle)
        train(handle, model, loss, wanted)
        goal = handle.goal
        assert goal.phase == "obeying"
        assert handle.stats.packed > 0
    marks = [path.name.split("-")[1] for path in folder.glob("compiled-*")]
    assert sorted(marks) == ["bool", "float32", "int64"]


def test_the_second_training_waits_for_nothing(waiting, folder):
    waiting.touch()
    for wanted_phase in ("compiling", "exploring"):
        model, x = perceptron(), torch.randn(64, 64)
        loss, _ = squared(model, x)
        with cswap.install(model) as handle:
            gradients(model, loss)
            assert handle.goal is not None
            assert handle.goal.phase == wanted_phase
            if wanted_phase == "compiling":
                wait(handle)
                gradients(model, loss)


def test_other_sources_are_compiled_anew(folder, monkeypatch):
    first_use._mark(folder, "float32").touch()
    assert first_use.missing([torch.float32]) == []
    monkeypatch.setattr(first_use, "_stamp", lambda: "other")
    assert first_use.missing([torch.float32]) == ["float32"]


def test_a_process_that_fails_is_said_and_kernels_are_compiled_in_the_steps(
    folder, monkeypatch, caplog
):
    program(monkeypatch, "raise SystemExit(3)")
    model, x = perceptron(256), torch.randn(256, 256, requires_grad=True)
    loss, wanted = squared(model, x)
    with cswap.install(model) as handle:
        gradients(model, loss)
        wait(handle)
        train(handle, model, loss, wanted)
        assert handle.goal is not None
        assert handle.goal.phase == "obeying"
    assert "exit status 3" in caplog.text
    assert not list(folder.glob("compiled-*"))


def test_one_training_compiles_and_the_other_waits(waiting, folder):
    handles: list[Any] = []
    loss: Any = None
    for _ in range(2):
        model = perceptron()
        loss, _ = squared(model, torch.randn(64, 64))
        handles.append(cswap.install(model))
        gradients(model, loss)
    first, second = (handle._fit._first_use._compiling for handle in handles)
    assert first._process is not None
    assert second._process is None
    first.end()  # the first training ends; the second one compiles
    assert not second.done
    assert second._process is not None
    waiting.touch()
    second._process.wait()
    assert second.done
    for handle in handles:
        handle.remove()


def test_no_process_is_left_behind(waiting):
    model = perceptron()
    loss, _ = squared(model, torch.randn(64, 64))
    handle = cswap.install(model)
    gradients(model, loss)
    compiling: Any = handle._fit and handle._fit._first_use._compiling
    handle.remove()
    assert compiling._process.poll() is not None


def test_a_fork_that_ends_leaves_the_process_alone(waiting):
    model = perceptron()
    loss, _ = squared(model, torch.randn(64, 64))
    with cswap.install(model) as handle:
        gradients(model, loss)
        compiling: Any = handle._fit and handle._fit._first_use._compiling
        first_use._end(compiling._process, os.getpid() + 1)
        assert compiling._process.poll() is None


def test_a_program_that_embeds_python_is_not_run_once_more(folder, monkeypatch):
    assert first_use.missing([torch.float32])
    for program in ("/opt/app/app", "", None):
        monkeypatch.setattr(sys, "executable", program)
        assert not first_use.missing([torch.float32])


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("options", [{"fit": "1GiB"}, {"lossy": "int8", "slowdown": 1.2}])
def test_a_goal_that_somebody_asked_for_and_a_lossy_one_do_not_wait(options):
    model = perceptron()
    loss, _ = squared(model, torch.randn(64, 64))
    with cswap.install(model, **options) as handle:
        gradients(model, loss)
        assert handle.goal is not None
        assert handle.goal.phase == "exploring"


def test_the_dtype_of_autocast_is_compiled_too(waiting):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(64, 64)
    with cswap.install(model) as handle, torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).sum().backward()
        compiling: Any = handle._fit and handle._fit._first_use._compiling
        assert set(compiling._dtypes) == {"bfloat16", "float32", "bool", "int64"}


@pytest.mark.slow
def test_the_training_itself_compiles_nothing(tmp_path):
    """With an empty folder, and the process that really compiles."""
    script = """
        import time, torch, cswap
        from cswap_kernels import jit
        model = torch.nn.Sequential(*(m for _ in range(4) for m in (
            torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1))))
        x = torch.randn(512, 256)
        with cswap.install(model) as handle:
            phases = []
            while not phases or phases[-1] != "obeying":
                model(x).square().mean().backward()
                phases.append(handle.goal.phase)
                time.sleep(0.1)
        assert phases[0] == "compiling", phases[0]
        assert handle.stats.swapped > 0
        assert not jit.told_of_compiling.is_set()  # all kernels came from the folder
    """
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    paths = {"PYTHONPATH": ":".join(sys.path), "CSWAP_CACHE_DIR": str(tmp_path)}
    code = textwrap.dedent(script)
    subprocess.run([sys.executable, "-c", code], env={**environment, **paths}, check=True)
