"""`python -m bench codecs` on the user's own tensors, and what it says when they are wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from bench.__main__ import app
from bench.user_tensors import MIN_BYTES, load, record

SCRIPT = """
import sys
import torch
assert sys.argv == [__file__]
if __name__ == "__main__":
    torch.manual_seed(0)
    weight = torch.randn(256, 256, requires_grad=True)
    x = torch.randn(512, 256)
    hidden = (x @ weight).relu()
    (hidden @ weight).square().sum().backward()
    raise SystemExit(0)
"""


def run(*arguments):
    options = ["--rounds", "1", "--codecs", "zvc,int8", *map(str, arguments)]
    return CliRunner().invoke(app, ["codecs", *options], env={"COLUMNS": "200"})


def test_what_a_scripts_autograd_saves_is_measured(tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    found = record(str(script))
    assert [d.kind.split()[1] for d in found] == ["leaf", "ReluBackward0", "MmBackward0"]
    assert all(d.tensor.nbytes >= MIN_BYTES for d in found)
    result = run("--record", script, "--out", out)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert {row["codec"] for row in rows} == {"memcpy", "zvc", "int8"}
    relu = next(r for r in rows if "Relu" in r["data"] and r["codec"] == "zvc")
    assert relu["ratio"] > 1.8


@pytest.mark.parametrize("suffix", [".pt", ".npy", ".npz"])
def test_files_of_torch_and_numpy_are_read(tmp_path, suffix):
    path = tmp_path / f"mine{suffix}"
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    if suffix == ".pt":
        torch.save({"a": torch.from_numpy(x).T, "b": [torch.arange(3)]}, path)
    elif suffix == ".npy":
        np.save(path, x)
    else:
        np.savez(path, a=x)
    found = load(str(path))
    assert found[0].tensor.is_contiguous()
    assert sorted(found[0].tensor.tolist()) == list(range(6))
    assert len(found) == (2 if suffix == ".pt" else 1)
    result = run("--tensors", path)
    assert result.exit_code == 0, result.output
    assert "mine" in result.output


def wrong_file(tmp_path, kind):
    path = tmp_path / ("wrong.csv" if kind == "suffix" else "wrong.pt")
    if kind == "empty":
        torch.save(torch.empty(0), path)
    elif kind == "nothing":
        torch.save({"a": 3}, path)
    elif kind != "missing":
        path.write_text("no tensors")
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "cannot be read"),
        ("damaged", "cannot be read"),
        ("suffix", "must end in"),
        ("empty", "is empty"),
        ("nothing", "no tensor"),
    ],
)
def test_a_wrong_file_is_refused_with_exit_code_2(tmp_path, kind, message):
    result = run("--tensors", wrong_file(tmp_path, kind))
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("import torch\ntorch.ones(3)", "saved no tensor"),
        ("raise ValueError('mine')", "ValueError: mine"),
    ],
)
def test_a_script_that_records_nothing_is_refused(tmp_path, text, message):
    script = tmp_path / "script.py"
    if text is not None:
        script.write_text(text)
    result = run("--record", script)
    assert result.exit_code == 2
    assert message in result.output


def test_an_unknown_codec_is_refused():
    result = CliRunner().invoke(app, ["codecs", "--codecs", "zcv", "--tensors", "x.pt"])
    assert result.exit_code == 2
    assert "zcv" in result.output
    assert "zvc" in result.output
