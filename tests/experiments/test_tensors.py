"""`cswap bench codecs`, on the user's own tensors, and what it says when they are wrong."""

from __future__ import annotations

import json
import pickle
import re
import sys
import types

import numpy as np
import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from cswap.cli import app
from cswap.errors import CswapError
from cswap.experiments.codecs.script_tensors import MIN_BYTES, record
from cswap.experiments.codecs.totals import EACH, best, totals
from cswap.experiments.codecs.user_tensors import load

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

TRAINING = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)
        self.register_buffer("mask", torch.ones(256, 128))

    def forward(self, x):
        return self.mask * x + self.down(self.up(self.norm(x)).relu())

model = nn.Sequential(Block(), Block())
for step in range(3):
    print(f"{step=}")
    with torch.autocast("cpu", enabled=step == AUTOCAST):
        loss = model(torch.randn(256, 128))
    loss.square().sum().backward()
    print(f"{step=} is over")
"""


def run(*arguments):
    options = ["--rounds", "1", "--codecs", "zvc,int8", *map(str, arguments)]
    return CliRunner().invoke(app, ["bench", "codecs", *options], env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_what_a_scripts_autograd_saves_is_measured(tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    found = record(str(script))
    assert [d.data.split(":")[0] for d in found] == ["leaf", "ReluBackward0", "MmBackward0"]
    assert all(d.nbytes >= MIN_BYTES for d in found)
    result = run("--record", script, "--out", out)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert {row["codec"] for row in rows} == {"memcpy", "zvc", "int8"}
    relu = next(r for r in rows if "Relu" in r["data"] and r["codec"] == "zvc")
    assert relu["ratio"] > 1.8
    (last,) = [line for line in result.output.splitlines() if "lossy: int8" in line]
    assert result.output.rstrip().endswith(last)
    assert "Best for your model, lossless: zvc. 1.5 MiB become 1.3 MiB (ratio 1.1" in result.output
    assert f"Measuring 1 of 3: {rows[0]['data']}" in result.output


@pytest.mark.parametrize("autocast", [0, None])
def test_one_step_of_a_training_is_recorded_by_module_without_parameters(
    tmp_path, capsys, autocast
):
    script = tmp_path / "train.py"
    script.write_text(TRAINING.replace("AUTOCAST", str(autocast)))
    found = {d.data: d for d in record(str(script))}
    assert capsys.readouterr().out == "step=0\nstep=0 is over\nstep=1\n"
    assert list(found) == [
        "*.norm LayerNorm: 2 of 256x128",
        "*.up Linear: 2 of 256x128",
        "* Block: 2 of 256x512",
        "AddBackward0: 1 of 256x128",
    ]


def test_of_a_large_row_a_sample_is_kept_that_stands_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr("cswap.experiments.codecs.script_tensors.ROW_LIMIT", 3 * 256 * 512)
    script = tmp_path / "train.py"
    script.write_text(TRAINING.replace("AUTOCAST", "None"))
    (hidden,) = [d for d in record(str(script)) if "Block" in d.data]
    assert (hidden.nbytes, hidden.saved_bytes) == (3 * 256 * 512, 2 * 4 * 256 * 512)


def test_totals_count_bytes_and_not_tensors():
    def row(data, codec, ratio, rate, lossless=True):
        speed = dict.fromkeys(("encode_gb_per_s", "decode_gb_per_s"), rate)
        size = 3e9 if data == "large" else 1e9
        known = {"data": data, "dtype": "float32", "codec": codec, "ratio": ratio}
        return {**known, "lossless": lossless, "saved_bytes": size, **speed}

    rows = [
        *(row(data, "memcpy", 1, 100) for data in ("large", "small")),
        *(row("large", "zvc", 3, 1), row("small", "zvc", 1, 1)),
        *(row("large", "lz4", 2.95, 4), row("small", "bitpack", 4, 2)),
    ]
    found = {t.codec: t for t in totals(rows)}
    assert found["zvc"].ratio == pytest.approx(4 / 2)
    assert found["bitpack"].ratio == pytest.approx(4 / 3.25)  # the large one stays
    assert found["bitpack"].encode_s == pytest.approx(0.5)
    assert found[EACH].ratio == pytest.approx(4 / (3 / 2.95 + 1 / 4))
    assert best(found.values(), lossless=True) == found["lz4"]  # nearly as small, and faster
    assert best(found.values(), lossless=False) is None


def test_a_report_on_ones_own_tensors_has_a_row_for_each_and_no_table_of_other_data(tmp_path):
    pytest.importorskip("matplotlib")
    torch.save({"of $x": torch.randn(1 << 14).relu()}, tmp_path / "mine.pt")
    out = tmp_path / "results" / "mine.json"
    result = run("--tensors", tmp_path / "mine.pt", "--out", out)
    assert result.exit_code == 0, result.output
    assert out.with_name("mine-pareto.png").exists()
    result = CliRunner().invoke(app, ["bench", "report", str(out.parent)])
    assert result.exit_code == 0, result.output
    page = out.with_name("report.html").read_text()
    assert re.findall("<td>(mine.*?)</td><td>0.1</td><td>zvc</td>", page) == ["mine.of $x float32"]
    assert page.count("<h3>") == 3  # saved tensors, totals, the picture
    assert "left out" not in page


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
    assert found[0].make().is_contiguous()
    assert sorted(found[0].make().tolist()) == list(range(6))
    assert len(found) == (2 if suffix == ".pt" else 1)
    result = run("--tensors", path)
    assert result.exit_code == 0, result.output
    assert "mine" in result.output


class RunsCode:
    """Unpickled carelessly, it raises."""

    def __reduce__(self):
        return exec, ("raise SystemExit('the code was run')",)


def wrong_file(tmp_path, kind):
    path = tmp_path / f"wrong.{SUFFIXES.get(kind, 'pt')}"
    x = {
        "empty": torch.empty(0),
        "nothing": {"a": 3},
        "pickle": {"a": RunsCode()},
        "module": torch.nn.Linear(2, 2),
        "sparse": torch.ones(3).to_sparse(),
        "meta": torch.ones(3, device="meta"),
    }
    if kind in x:
        torch.save(x[kind], path)
    elif kind == "plain pickle":
        path.write_bytes(pickle.dumps(RunsCode()))
    elif kind == "objects":
        np.save(path, np.array([{}, 1], dtype=object), allow_pickle=True)
    elif kind == "text":
        np.save(path, np.array(["a"]))
    elif kind == "folder":
        path.mkdir()
    elif kind == "no bytes":
        path.touch()
    elif kind != "missing":
        path.write_text("no tensors")
    return path


SUFFIXES = {
    "suffix": "csv",
    "objects": "npy",
    "text": "npy",
    "damaged npz": "npz",
    "damaged npy": "npy",
}


def one_line(result, message):
    assert isinstance(result.exception, CswapError), result.output  # `cli.main` prints one line
    assert message in str(result.exception)
    assert len(str(result.exception).splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "cannot be read"),
        ("damaged", "cannot be read"),
        ("no bytes", "cannot be read: EOFError"),
        ("damaged npz", "cannot be read"),
        ("folder", "Is a directory"),
        ("suffix", "must end in"),
        ("empty", "is empty"),
        ("nothing", "no tensor"),
        ("pickle", "would run its code"),
        ("plain pickle", "would run its code"),
        ("module", "would run its code"),
        ("objects", "or holds objects. Save arrays"),
        ("text", "cannot be read"),
        ("damaged npy", "it is damaged, or holds objects"),
        ("sparse", "no codec takes it"),
        ("meta", "no codec takes it"),
    ],
)
def test_a_wrong_file_is_refused_with_one_line(tmp_path, kind, message):
    one_line(run("--tensors", wrong_file(tmp_path, kind)), message)


def test_arrays_of_another_byte_order_are_read(tmp_path):
    np.save(tmp_path / "x.npy", np.array([1.0, 2.0], dtype=">f4"))
    (found,) = load(str(tmp_path / "x.npy"))
    assert found.make().tolist() == [1.0, 2.0]


def test_safetensors_are_read(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    one_line(run("--tensors", path), "pip install safetensors")
    fake = types.SimpleNamespace(
        load_file=lambda file: {"a": torch.ones(3)} if file == path else {}
    )
    monkeypatch.setitem(sys.modules, "safetensors", types.ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", fake)
    (found,) = load(str(path))
    assert (found.data, found.make().tolist()) == ("x.a", [1.0] * 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("import torch\ntorch.ones(3)", "saved no tensor"),
        ("raise ValueError('mine\\nin two lines')", "ValueError: mine"),
        ("raise SystemExit(3)", "exits with 3"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_script_that_records_nothing_is_refused(tmp_path, text, message):
    script = tmp_path / "script.py"
    if text is not None:
        script.write_text(text)
    one_line(run("--record", script), message)


def test_a_script_finds_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_script.py").write_text(
        SCRIPT.replace("assert sys.argv == [__file__]", "")
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import runpy, neighbour_of_script as n; runpy.run_path(n.__file__, run_name='__main__')"
    )
    before = list(sys.path)
    assert len(record(str(script))) == 3
    assert sys.path == before


def test_a_script_gets_its_arguments_and_tensors_that_no_codec_takes_are_left_out(tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(
        "import sys, torch\n"
        "assert sys.argv[1:] == ['--size', '128 2'], sys.argv\n"
        "x = torch.ones(512, 64, requires_grad=True)\n"
        "torch.sparse.mm(torch.eye(512).to_sparse(), x).sin().sum().backward()\n"
    )
    result = run("--record", script, "--out", out, "--", "--size", "128 2")
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert len({row["data"] for row in document["rows"]}) == 1  # the sparse one is left out
    assert document["settings"]["own"] == f"{script} --size '128 2'"
    one_line(run("--", "--size"), "give --record")


def test_own_tensors_exclude_each_other():
    one_line(run("--tensors", "x.pt", "--record", "y.py"), "--tensors and --record exclude")
    assert run("--tensors", "x.pt", "--rounds", "0").exit_code == 2


def test_an_unknown_codec_is_refused():
    result = run("--codecs", "zcv", "--tensors", "x.pt")
    one_line(result, "zcv")
    assert "zvc" in str(result.exception)
