"""The examples in docs/examples run as they stand, where their packages are installed."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks' own


def test_own_loop(capsys):
    handle = runpy.run_path(str(EXAMPLES / "own_loop.py"))["handle"]
    *epochs, shown = capsys.readouterr().out.split("\n", 3)
    losses = [float(re.fullmatch(r"epoch \d: loss ([\d.]+)", line)[1]) for line in epochs]  # type: ignore[index]
    assert losses == sorted(losses, reverse=True)
    assert handle.stats.packed > 0
    assert shown == f"{handle.stats}\n{handle.engine.explain()[0]}\n"


def test_with_trainer(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "with_trainer.py"))["main"]
    history = main(["--cswap_min_bytes", "1KiB"]).state.log_history
    assert [entry["cswap/saved_mib"] > 0 for entry in history if "loss" in entry] == [True] * 3


def test_with_lightning(monkeypatch, tmp_path):
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "with_lightning.py"))["main"]
    assert main().stats.swapped > 0


def cells_of(notebook):
    """Sources of the notebook's code cells, with its shell lines as calls of `shell`."""
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        assert not cell.get("outputs")  # committed without: figures belong to a machine
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            yield "\n".join(f"shell({line[1:]!r})" if line[:1] == "!" else line for line in lines)


AS_A_MODULE = """
import os, runpy, sys
os.chdir(sys.argv[1])
sys.argv[:] = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""As `python -m`, in a process that has imported torch."""


def test_the_notebook_goes_from_stats_to_explain_to_report(monkeypatch, tmp_path, capsys, forked):
    pytest.importorskip("typer")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []

    def shell(line):
        done = forked.run(AS_A_MODULE, tmp_path, *shlex.split(line))
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)

    names = {"shell": shell}
    for source in cells_of(EXAMPLES / "stats_to_report.ipynb"):
        exec(compile(source, "stats_to_report.ipynb", "exec"), names)
    printed = capsys.readouterr().out
    assert "ratio" in printed
    assert "times less than lossless" in printed
    # No bound: which codecs are chosen in six steps depends on times, so on the machine's load.
    assert float(printed.split(" times less")[0].split()[-1]) > 0
    assert len(said) == 3
    assert all(said)
