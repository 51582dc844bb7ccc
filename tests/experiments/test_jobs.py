"""`--jobs`: trainings in other processes give the same losses, in order."""

from __future__ import annotations

import json
import pickle
import warnings
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

import torch
from typer.testing import CliRunner

from cswap import cli
from cswap.errors import ConfigError
from cswap.experiments.accuracy import pictures
from cswap.experiments.accuracy.own_task import OwnTask
from cswap.experiments.files import resumable
from cswap.experiments.files.resumable import results

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_model.py"
SHORT = ("--steps", "5", "--seeds", "3", "--policies", "int8")


def command_of(folder, *options):
    """`cswap bench accuracy` on the example."""
    task = ("bench", "accuracy", "--task", f"{EXAMPLE}:make_task")
    return [*task, *SHORT, "--out", str(folder), *options]


def train_here(folder, *options):
    """Run the command in this process, which has imported what it needs; the result document."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other processes: sums in the same order
    try:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setenv("OMP_NUM_THREADS", "1")
            # It draws, which takes seconds.
            patch.setattr(pictures, "pareto", lambda *_: None)
            done = CliRunner().invoke(cli.app, command_of(folder, *options))
    finally:
        torch.set_num_threads(n_threads)
    assert done.exit_code == 0, done.output
    assert done.output.count("results.json") == 1
    return found_in(folder)


def interrupt(folder):
    """Begin the command, and end it by Ctrl-C; its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CliRunner().invoke(cli.app, command_of(folder)).exit_code


def interrupted_after_one(call, parts, _jobs):
    """As `results`, until Ctrl-C."""
    yield parts[0], call(parts[0])
    raise KeyboardInterrupt


def found_in(folder):
    """The document without its machine, and without bytes: they depend on measured times."""
    document = json.loads((folder / "results.json").read_text())
    timed = ("held_bytes", "eligible_bytes", "by_codec")
    runs = [{k: v for k, v in run.items() if k not in timed} for run in document["runs"]]
    kept = ("complete", "settings", "models")
    return {"runs": runs, **{key: document[key] for key in kept}}


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    train_here(folder)
    return folder


def run_reversed(call, parts, _jobs):
    """As `results`: what is sent to the processes, and the last part ends first."""
    for part in reversed(parts):
        yield part, pickle.loads(pickle.dumps(call))(part)


def test_parts_that_end_in_another_order_give_the_same_file(in_one_process, tmp_path, monkeypatch):
    # Two processes that import torch and its optimizers take 15 s, so they are a slow test.
    monkeypatch.setattr(resumable, "results", run_reversed)
    found = train_here(tmp_path, "--jobs", "2")
    assert found["complete"]
    assert json.dumps(found) == json.dumps(found_in(in_one_process))


@pytest.mark.slow
def test_processes_write_the_same_losses(in_one_process, tmp_path):
    # They go on from an unfinished run of one process.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resumable, "results", interrupted_after_one)
        assert interrupt(tmp_path) == 130
    unfinished = json.loads((tmp_path / "results.partial.json").read_text())
    assert list(unfinished["done"]) == ["halves 0"]
    found = train_here(tmp_path, "--jobs", "2")
    assert found["complete"]
    assert json.dumps(found) == json.dumps(found_in(in_one_process))


@pytest.mark.slow
def test_results_come_as_parts_end_and_an_error_reaches_the_command():
    assert sorted(results(abs, [-3, 2, -1], 2)) == [(-3, 3), (-1, 1), (2, 2)]
    with pytest.raises(ZeroDivisionError):
        list(results(partial(divmod, 1), [1, 0], 2))


def test_a_task_of_another_file_is_refused_in_the_other_process():
    source = OwnTask.of(f"{EXAMPLE}:make_task", 5)
    assert source("halves") is source()
    changed = OwnTask(source.spec, 5, "0" * 12)
    with pytest.raises(ConfigError, match="another file here"):
        changed("halves")
