"""GPU tests in slices: every file is in one, output survives a kill, a late slice is ended."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from bench.gpu import slices


def test_every_gpu_test_is_in_one_slice():
    files = [file for part in slices.SLICES.values() for file in part.files]
    there = sorted(p.name for p in (Path(__file__).parents[1] / "gpu").glob("test_*.py"))
    assert sorted(files) == there


def test_a_command_names_its_files():
    command = slices.SLICES["codecs"].command()
    assert [c for c in command if c.startswith("tests/")] == ["tests/gpu/test_gpu_codecs.py"]


@pytest.mark.slow
def test_the_slice_of_codecs_is_collected_with_a_folder_of_kernels(tmp_path, monkeypatch):
    """tests/kernels/test_kernel_folder.py has the loading of its kernels, on a stand-in."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path))
    command = [*slices.SLICES["codecs"].command(), "--collect-only", "-q"]
    found = slices.run("codecs", command, tmp_path / "log")
    assert found.good
    assert re.search(r"\d{3} tests collected", found.last), (tmp_path / "log").read_text()


def test_output_is_shown_and_kept(tmp_path, capsys):
    log = tmp_path / "log"
    found = slices.run("some", [sys.executable, "-c", "print('one'); print('2 passed')"], log)
    assert (found.good, found.code, found.last) == (True, 0, "2 passed")
    assert log.read_text() == capsys.readouterr().out == "one\n2 passed\n"
    assert str(found).split() == ["some", "passed", "0", "s", "2", "passed"]


def test_a_failure_and_a_late_slice_are_told(tmp_path):
    failed = slices.run("some", [sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "a")
    assert (failed.good, failed.late, failed.code) == (False, False, 1)
    wait = "import time; print('begun', flush=True); time.sleep(60)"
    late = slices.run("some", [sys.executable, "-c", wait], tmp_path / "b", limit_s=0.5)
    assert (late.good, late.late) == (False, True)
    assert late.took_s < 30


def test_the_summary_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "print('3 passed')"]
    monkeypatch.setattr(slices.Slice, "command", lambda _self: command)
    assert slices.main(["memory,stress"]) == 0
    lines = (tmp_path / "gpu-tests" / "summary.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [["memory", "passed"], ["stress", "passed"]]
    assert slices.main(["nothing"]) == 2
    assert "known are codecs, memory" in capsys.readouterr().err
