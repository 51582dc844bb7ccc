"""On a machine that has compiled nothing, steps run without cswap until a process has done it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap import warm
from cswap.codecs import first_use
from tests.fit.test_default_on_a_cpu import equal, gradients, perceptron, squared, train

COMPILES = first_use.PROGRAM
"""The program of the process, before any test replaces its last lines."""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty folder for the marks of compiled kernels."""
    monkeypatch.setenv("CSWAP_CALIBRATE", "1")
    monkeypatch.setattr(first_use, "numba_folder", lambda: tmp_path)
    monkeypatch.setattr(first_use, "_started", {})
    yield tmp_path
    (tmp_path / "gate").touch()
    for process, _ in first_use._started.values():
        process.wait()


def ends_with(monkeypatch, text):
    """Let the process lock the file, and run this in place of compiling."""
    locks = COMPILES[: COMPILES.index("from cswap")]
    monkeypatch.setattr(first_use, "PROGRAM", locks + textwrap.dedent(text))


@pytest.fixture
def gate(monkeypatch, folder):
    """The process waits until this file is there, and then leaves its marks."""
    stamp = first_use._stamp()
    ends_with(
        monkeypatch,
        f"""
        import os, time
        while not os.path.exists({str(folder / "gate")!r}): time.sleep(0.01)
        for name in sys.argv[2:]: open(f"{folder}/compiled-{{name}}-{stamp}", "w")
        """,
    )
    return folder / "gate"


def compiling():
    """The process of this training."""
    ((process, _),) = first_use._started.values()
    return process


def phase_of(handle):
    goal: Any = handle.goal
    return goal.phase


def test_steps_run_without_cswap_until_the_kernels_are_there(gate, folder, caplog):
    model, x = perceptron(256), torch.randn(256, 256, requires_grad=True)
    loss, wanted = squared(model, x)
    with cswap.install(model) as handle:
        for _ in range(3):
            assert equal(gradients(model, loss), wanted)
            assert phase_of(handle) == "compiling"
        assert handle.stats.packed == 0
        assert str(handle).endswith("steps run without cswap")
        assert "beside the training" in caplog.text
        gate.touch()
        compiling().wait()
        train(handle, model, loss, wanted)
        assert phase_of(handle) == "obeying"
        assert handle.stats.packed > 0
    marks = [path.name.split("-")[1] for path in folder.glob("compiled-*")]
    assert sorted(marks) == ["bfloat16", "bool", "float32", "int64"]


def test_the_next_training_waits_for_nothing(gate):
    gate.touch()
    for wanted_phase in ("compiling", "exploring"):
        model, x = perceptron(), torch.randn(64, 64)
        loss, _ = squared(model, x)
        with cswap.install(model) as handle:
            gradients(model, loss)
            assert phase_of(handle) == wanted_phase
        compiling().wait()


@pytest.mark.usefixtures("gate")
def test_two_models_of_a_training_share_one_process():
    handles = []
    for _ in range(2):
        model = perceptron()
        loss, _ = squared(model, torch.randn(64, 64))
        handles.append(cswap.install(model))
        gradients(model, loss)
        assert phase_of(handles[-1]) == "compiling"
    assert len(first_use._started) == 1
    for handle in handles:
        handle.remove()


def test_the_process_waits_for_that_of_another_training(gate, folder):
    gate.touch()
    with (folder / first_use.LOCK).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        first_use.begin(["float32"])
        time.sleep(0.3)
        assert not first_use.is_done(["float32"])
        assert compiling().poll() is None
    compiling().wait()
    assert first_use.is_done(["float32"])


def test_nobody_waits_for_ever(gate, monkeypatch, caplog):
    del gate
    first_use.begin(["float32"])
    assert not first_use.is_done(["float32"])
    monkeypatch.setattr(first_use, "MOST_S", 0.0)
    assert first_use.is_done(["float32"])
    assert "not compiled beside" in caplog.text


def test_other_sources_are_compiled_anew(folder, monkeypatch):
    first_use.note_compiled(["float32"])
    assert first_use.missing([torch.float32]) == []
    monkeypatch.setattr(first_use, "_stamp", lambda: "other")
    assert first_use.missing([torch.float32]) == ["float32"]
    assert len(list(folder.iterdir())) == 1


@pytest.mark.usefixtures("folder")
def test_a_process_that_fails_is_said_and_kernels_are_compiled_in_the_steps(monkeypatch, caplog):
    ends_with(monkeypatch, "raise SystemExit(3)")
    model, x = perceptron(256), torch.randn(256, 256, requires_grad=True)
    loss, wanted = squared(model, x)
    with cswap.install(model) as handle:
        gradients(model, loss)
        compiling().wait()
        train(handle, model, loss, wanted)
        assert phase_of(handle) == "obeying"
    assert "exit status 3" in caplog.text


@pytest.mark.usefixtures("folder")
def test_where_no_process_can_be_started_nothing_waits(monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(subprocess, "Popen", fails)
    model = perceptron()
    loss, wanted = squared(model, torch.randn(64, 64))
    with cswap.install(model) as handle:
        assert equal(gradients(model, loss), wanted)
        assert phase_of(handle) == "exploring"


def test_a_fork_neither_waits_nor_leaves_marks(gate, folder):
    del gate
    first_use.begin(["float32"])
    if not (pid := os.fork()):
        os._exit(0 if first_use.is_done(["float32"]) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert not list(folder.glob("compiled-*"))
    assert compiling().poll() is None


@pytest.mark.usefixtures("gate")
def test_paths_that_are_no_text_and_threads_do_no_harm(monkeypatch):
    paths: list[Any] = [*sys.path, Path("/somewhere"), ""]
    monkeypatch.setattr(sys, "path", paths)
    thread = threading.Thread(target=first_use.begin, args=(["float32"],))
    thread.start()
    thread.join()
    assert compiling().poll() is None


@pytest.mark.usefixtures("folder")
def test_a_program_that_embeds_python_is_not_run_once_more(monkeypatch):
    assert first_use.missing([torch.float32])
    for program in ("/opt/app/app", "", None):
        monkeypatch.setattr(sys, "executable", program)
        assert not first_use.missing([torch.float32])


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("options", [{"fit": "1GiB"}, {"lossy": "int8", "slowdown": 1.2}])
def test_a_goal_that_somebody_asked_for_and_a_lossy_one_do_not_wait(options):
    model = perceptron()
    loss, _ = squared(model, torch.randn(64, 64))
    with cswap.install(model, **options) as handle:
        gradients(model, loss)
        assert phase_of(handle) == "exploring"


@pytest.mark.usefixtures("gate")
def test_the_dtype_of_autocast_is_compiled_too():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(64, 64)
    with cswap.install(model), torch.autocast("cpu", dtype=torch.float16):
        model(x).sum().backward()
    (dtypes,) = first_use._started
    assert set(dtypes) == {"float16", "float32", "bool", "int64"}


def test_warm_leaves_the_marks_of_a_first_use(folder, monkeypatch):
    monkeypatch.setattr(warm, "_compile", lambda name, _dtypes: name)
    monkeypatch.setattr(warm, "lossless_candidates", lambda: ("zvc", "rle"))
    list(warm.steps(["zvc"], dtypes=[torch.float32]))
    assert first_use.missing([torch.float32]) == ["float32"]  # others may be wanted
    list(warm.steps(["rle", "zvc", "int8"], dtypes=[torch.float32]))
    assert first_use.missing([torch.float32, torch.bool]) == ["bool"]
    warm.first_use(["bool", "complex64"])
    assert first_use.missing([torch.bool, torch.complex64]) == []
    assert len(list(folder.glob("compiled-*"))) == 3


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
