"""`cswap bench accuracy --task`: a user's own model, and the messages about a wrong one."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

import torch

from cswap import cli
from cswap.errors import ConfigError, UnsupportedError
from cswap.experiments import options
from cswap.experiments.accuracy import sweep
from cswap.experiments.accuracy.own_task import load
from cswap.experiments.accuracy.train import train as train_all

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_model.py"
SHORT = ("--steps", "5", "--seeds", "2", "--policies", "int8")

TASK = """
import torch
from cswap.experiments.task import Task

def make_task():
    x, y = torch.randn(8, 4), torch.randint(2, (8,))
    fields = dict(
        name="mine", n_steps=5, peak_lr=0.1, build=lambda: torch.nn.Linear(4, 2),
        optimizer=lambda model: torch.optim.SGD(model.parameters()),
        batch=lambda seed, step: (x, y), validation=((x, y),),
    )
    return Task(**{**fields, **dict({change})})

def make_nothing():
    pass

def leave():
    raise SystemExit(3)

def make_error():
    raise ValueError("no data")
"""


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Run `cswap bench accuracy --task` in an empty folder; return exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copy(EXAMPLE, tmp_path)

    def call(*arguments, task="own_model.py:make_task"):
        monkeypatch.setattr(sys, "argv", ["cswap", "bench", "accuracy", "--task", task, *arguments])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return (leaving.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def spec(monkeypatch, tmp_path):
    """Write a file with the task, changed in one field; return its ``FILE.py:FUNCTION``."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(change="", function="make_task"):
        file = tmp_path / "mine.py"
        file.write_text(TASK.replace("{change}", change.replace("\n", " ")))
        return f"{file}:{function}"

    return write


def test_the_example_is_trained_and_reported_and_its_runs_go_on(bench, monkeypatch, tmp_path):
    seeds = []

    def train(task, policies, seed, on_step):
        seeds.append(seed)
        if len(seeds) == 2:
            raise KeyboardInterrupt
        return train_all(task, policies, seed, on_step)

    monkeypatch.setattr(sweep, "train", train)
    assert bench(*SHORT, "--margin", "0.5")[0] == 130
    assert bench(*SHORT, "--margin", "0.5")[0] == 0
    assert seeds == [0, 1, 1]
    folder = tmp_path / "cswap-results" / "accuracy-halves"
    found = json.loads((folder / "results.json").read_text())
    assert found["complete"]
    assert found["settings"]["margins"] == {"halves": 0.5}
    assert found["models"]["halves"]["data"] == "noise with a brighter half"
    assert [row["policy"] for row in found["summary"]] == ["off", "int8"]
    page = (folder / "report.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page  # opens without a network
    for text in ("In short", "undecided", "noise with a brighter half"):
        assert text in page


@pytest.fixture
def asked(monkeypatch):
    """Settings and folders of the runs that would have begun."""
    found = []

    def compare(study, **_):
        found.append({**study.settings, "folder": study.folder.as_posix()})

    monkeypatch.setattr(sweep, "compare", compare)
    return found


def test_the_tasks_margin_holds_for_its_own_number_of_steps(bench, asked):
    bench()
    bench("--steps", "5")
    bench("--quick", "--margin", "0.2")
    assert [settings["margins"] for settings in asked] == [{"halves": 0.01}, {}, {"halves": 0.2}]
    assert asked[0]["seeds"] == {"halves": 5}
    folders = [settings["folder"] for settings in asked]
    assert folders[0] == folders[1] == "cswap-results/accuracy-halves"
    assert folders[2] == "cswap-results/accuracy-halves-quick"  # replaces no long run's results


def test_runs_of_a_changed_file_are_begun_anew(bench, asked, tmp_path):
    bench()
    bench()
    with (tmp_path / "own_model.py").open("a") as file:
        file.write("# changed\n")
    bench()
    assert asked[0] == asked[1] != asked[2]


def test_another_loss_and_other_types_are_trained(bench, spec, tmp_path):
    change = """
        build=lambda: torch.nn.Linear(4, 3).double(), validation=((x.double(), x[:, :3].double()),),
        batch=lambda seed, step: (x.double(), x[:, :3].double()),
        loss=torch.nn.functional.mse_loss, right=lambda out, targets: (out - targets).abs() < 0.1,
    """
    code, out, err = bench("--policies", "lossless", "--seeds", "1", task=spec(change))
    assert code == 0, out + err
    found = json.loads((tmp_path / "cswap-results" / "accuracy-mine" / "results.json").read_text())
    assert found["runs"][1]["same_bits"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("name='a/b'", "its Task has name='a/b'"),
        ("n_steps=3", "n_steps=3; the first 3 are not counted"),
        ("n_steps='5'", "its Task has n_steps='5'"),
        ("margin=-1.0", "margin=-1.0; it must be above 0"),
        ("validation=()", "no batches in validation"),
        ("build=lambda: 3", "build() returns a int; return a torch.nn.Module"),
        ("optimizer=lambda model: model", "optimizer(model) returns a Linear"),
        ("batch=lambda seed, step: x", "batch(0, 0) is a tensor of shape (8, 4); it must be"),
        ("batch=lambda seed: x", "batch(0, 0) fails: TypeError: "),
        ("build=lambda: torch.nn.Linear(5, 2)", "the model on batch(0, 0) fails: RuntimeError"),
        ("loss=lambda out, targets: out", "loss on batch(0, 0) is a tensor of shape (8, 2)"),
        ("right=lambda out, targets: out", "its shape must be the targets'"),
        ("batch=None", "its Task has batch=None"),
        ("facts={'x': x}", "JSON of the Task's facts fails: TypeError"),
    ],
)
def test_wrong_tasks_are_refused_before_anything_runs(change, message, spec):
    with pytest.raises(ConfigError) as refused:
        load(spec(change), None)
    assert str(refused.value).startswith("--task ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine.py", "must be FILE.py:FUNCTION, such as --task my.py:make_task"),
        ("nothing.py:make_task", "there is no file nothing.py"),
        ("x\0.py:make_task", "there is no file"),
        ("{}:make_tsk", "no function make_tsk in it. Did you mean make_task?"),
        ("{}:torch", "no function torch in it"),
        ("{}:make_nothing", "make_nothing() returns a NoneType; return a cswap.experiments.task"),
        ("{}:make_error", "make_error() fails: ValueError: no data"),
        ("{}:leave", "leave() fails: SystemExit: 3"),
    ],
)
def test_wrong_files_and_functions_are_refused(text, message, spec):
    file = spec().rpartition(":")[0]
    with pytest.raises(ConfigError) as refused:
        load(text.format(file), None)
    assert message in str(refused.value)


def test_errors_of_the_file_are_one_line(spec, bench, tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    code, _, err = bench(task=f"{tmp_path / 'mine.py'}:make_task")
    assert (code, err.count("\n")) == (2, 1)
    assert "import of mine.py fails: ModuleNotFoundError" in err


@pytest.mark.parametrize(
    "wrong", [("--steps", "3"), ("--margin", "0"), ("--margin", "nan"), ("--policies", "fp4")]
)
def test_wrong_options_are_one_line(wrong, bench):
    code, _, err = bench(*wrong)
    assert (code, err.count("\n")) == (2, 1)
    assert wrong[0] in err


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "scipy" else torch)
    with pytest.raises(UnsupportedError, match=r'needs scipy: pip install "\.\[bench\]"'):
        options.needs("bench accuracy", "matplotlib", "scipy")
