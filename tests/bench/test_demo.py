"""The demo end to end on a tiny configuration, and the byte count its figures rest on."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from bench.__main__ import app
from bench.demo.settings import DemoSettings
from bench.demo.summary import Row
from bench.demo.tables import conclusions
from bench.workloads.lockstep import Lockstep
from bench.workloads.tasks import make_task

ROOT = Path(__file__).parents[2]
ROW_KEYS = {
    "model", "mode", "peak_saved_bytes", "ratio", "step_time_rel", "final_loss", "accuracy",
    "bit_equal", "max_grad_diff",
}  # fmt: skip
MODES = ["off", "lossless", "remat", "int8", "checkpoint"]


def run_bench(*arguments: str):
    """Run `python -m bench` in this process: importing torch anew takes seconds."""
    n_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.demo.run.N_THREADS", 1)
        try:
            return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        finally:
            torch.set_num_threads(n_threads)


@pytest.fixture(
    scope="module",
    params=["gpt", pytest.param("cnn,gpt", marks=pytest.mark.slow)],
)
def demo(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    options = ["--models", request.param, "--modes", ",".join(MODES)]
    options += ["--steps", "2", "--out", str(out)]
    done = run_bench("demo", "--quick", *options)
    assert done.exit_code == 0, done.output
    document = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert list(document["models"]) == request.param.split(",")
    return out, done.output, document


def test_rows_hold_every_model_and_mode_with_the_promised_keys(demo):
    _, _, document = demo
    assert document["complete"] is True
    assert [(row["model"], row["mode"]) for row in document["rows"]] == [
        (model, mode) for model in document["models"] for mode in MODES
    ]
    for row in document["rows"]:
        assert set(row) >= ROW_KEYS
        assert None not in [row[key] for key in ROW_KEYS]


def row(mode, peak_saved_bytes, peak_ratio, step_time_rel, *, bit_equal, model="gpt"):
    known = {
        "model": model,
        "mode": mode,
        "peak_saved_bytes": peak_saved_bytes,
        "peak_ratio": peak_ratio,
        "step_time_rel": step_time_rel,
        "bit_equal": bit_equal,
        "fallbacks": 0,
        "n_steps": 2,
    }
    others = [f.name for f in fields(Row) if f.name not in known]
    return Row(**{**dict.fromkeys(others), **known})


def test_the_last_sentence_has_bytes_and_times_beside_checkpointing():
    rows = [
        row("off", 10 << 20, 1.0, 1.0, bit_equal=True),
        row("lossless", 8 << 20, 1.25, 1.049, bit_equal=True),
        row("remat", 5 << 20, 2.0, 1.1, bit_equal=True),
        row("int8", 2 << 20, 5.0, 0.99, bit_equal=False),
        row("checkpoint", 4 << 20, 2.5, 1.31, bit_equal=True),
    ]
    assert conclusions(rows) == [
        (
            "GPT, 10.0 MiB of saved tensors without: "
            "with nothing computed again 1.2 times less, every bit equal, at 1.05 times the time; "
            "with one line 2.0 times less, every bit equal, at 1.10 times the time; "
            "with int8 5.0 times less, at 0.99 times the time; "
            "by checkpointing 2.5 times less, at 1.31 times the time."
        )
    ]


def test_the_last_sentences_leave_out_what_is_not_known():
    rows = [
        row("off", 3 << 19, 1.0, 1.0, bit_equal=True, model="cnn"),
        row("remat", 1 << 20, 1.5, 1.2, bit_equal=False, model="cnn"),  # bits are not claimed
        row("int8", None, None, None, bit_equal=None, model="cnn"),  # interrupted before
        row("off", None, None, None, bit_equal=None),
        row("remat", 1 << 20, None, 1.2, bit_equal=True),
        row("remat", 1 << 20, 2.0, 1.2, bit_equal=True, model="alone"),  # nothing beside it
    ]
    assert conclusions(rows) == [
        (
            "CNN, 1.5 MiB of saved tensors without: "
            "with one line 1.5 times less, at 1.20 times the time."
        )
    ]
    assert conclusions([]) == []


def test_lossless_and_checkpoint_have_the_bits_of_off_and_int8_has_not(demo):
    _, _, document = demo
    equal = {(row["model"], row["mode"]): row["bit_equal"] for row in document["rows"]}
    differences = {(row["model"], row["mode"]): row["max_grad_diff"] for row in document["rows"]}
    for model in document["models"]:
        for mode in ("off", "lossless", "checkpoint"):
            assert (equal[model, mode], differences[model, mode]) == (True, 0.0)
        assert not equal[model, "int8"]
        assert differences[model, "int8"] > 0


def test_swapping_holds_fewer_bytes_than_off(demo):
    # not the peaks: how much waits to be encoded at a moment depends on the machine's load
    _, _, document = demo
    rows = {(row["model"], row["mode"]): row for row in document["rows"]}
    for model in document["models"]:
        off, lossless, _, int8 = (rows[model, mode] for mode in MODES[:4])
        assert 1 == off["ratio"] <= lossless["ratio"] < int8["ratio"]
        assert int8["held_bytes"] < off["held_bytes"]
    if "cnn" in document["models"]:
        assert rows["cnn", "lossless"]["ratio"] > 1.5  # half of what a ReLU lets through is zero


def test_curves_environment_and_picture_are_there(demo):
    out, output, document = demo
    for model in document["models"]:
        for mode in MODES:
            curve = document["curves"][model][mode]
            assert len(curve["train_loss"]) == len(curve["step_s"]) == 2
            assert curve["memory"][-1]["saved"]["bytes"][-1] == 0  # all given back
    assert {"cpu", "versions", "cswap_commit", "command", "seconds"} <= document[
        "environment"
    ].keys()
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "validation" in output
    last = output.strip().splitlines()[-1]
    for words in ("MiB of saved tensors without", "with one line", "with int8", "by checkpointing"):
        assert words in last


@pytest.mark.slow
def test_interrupted_run_writes_what_it_has(tmp_path, monkeypatch):
    look = Lockstep._look

    def stop(self, n_steps):
        if self.task.name == "gpt" and n_steps == 1:
            raise KeyboardInterrupt
        look(self, n_steps)

    monkeypatch.setattr(Lockstep, "_look", stop)
    done = run_bench(
        "demo", "--quick", "--steps", "2", "--modes", "off,checkpoint", "--out", str(tmp_path)
    )
    assert done.exit_code == 130, done.output
    assert "Interrupted" in done.output
    document = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert document["complete"] is False
    steps = [(row["model"], row["mode"], row["n_steps"]) for row in document["rows"]]
    assert steps == [
        ("cnn", "off", 2), ("cnn", "checkpoint", 2), ("gpt", "off", 1), ("gpt", "checkpoint", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--modes", "lossless"), "'off' is missing"),
        (("--modes", "off,int7"), "unknown int7; known are off, lossless, remat, int8, checkpoint"),
        (("--models", ""), "names nothing; known are cnn, gpt"),
        (("--steps", "0"), "--steps 0: must be at least 1"),
        (("--seed", "-1"), "--seed -1: must not be negative"),
        (("--out", "/dev/null/x"), "--out /dev/null/x: cannot write there"),
    ],
)
def test_wrong_option_is_refused_before_anything_runs(arguments, words):
    done = run_bench("demo", *arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.workloads.saved_bytes")


def relus(x, n):
    for _ in range(n):
        x = torch.relu(x * 2)  # relu saves its result; times a number saves nothing
    return x


def test_saved_bytes_counts_each_storage_once_and_forgets_it_when_it_dies(memory):
    weight = nn.Parameter(torch.ones(1024))
    saved = memory.SavedBytes([weight], [], memory.Held)
    with saved.watch():
        y = relus(weight, 3)
        y = y * y.view(1024)  # saves both factors: one storage, already counted
    saved.sample()
    assert saved.curve.nbytes[-1] == 3 * 4096
    y.sum().backward()
    del y
    saved.sample()
    assert (saved.curve.peak, saved.curve.nbytes[-1]) == (3 * 4096, 0)


def test_saved_bytes_follows_a_checkpoint_into_its_recomputation(memory):
    weight = nn.Parameter(torch.ones(1024))
    saved = memory.SavedBytes([weight], [], memory.Held)
    with saved.watch():
        y = relus(weight, 1)
        y = checkpoint(
            relus, y, 4, use_reentrant=False,
            context_fn=lambda: (nullcontext(), saved.watch()),
        )  # fmt: skip
        saved.sample()
        assert saved.curve.nbytes[-1] == 4096  # the first relu's result, also the block's input
        y.sum().backward()
    assert saved.curve.peak == 5 * 4096


def test_heap_bytes_sees_an_allocation(memory):
    before = memory.heap_bytes()
    if before is None:
        pytest.skip("the C library is not glibc >= 2.33")
    x = torch.ones(1 << 22, dtype=torch.uint8)
    grown = memory.heap_bytes() - before
    assert 1 << 22 <= grown < (1 << 22) + (1 << 18)
    del x


def test_the_larger_gpt_is_trained_only_if_it_is_asked_for(tmp_path):
    options = {"out": tmp_path, "modes": "off", "steps": None, "seed": 0, "quick": False}
    assert DemoSettings.parse(models="gpt6", **options).models == ("gpt6",)
    assert "gpt6" not in DemoSettings(tmp_path).models
    small, large = (make_task(name, quick=False, n_steps=1) for name in ("gpt", "gpt6"))
    assert (small.name, large.name) == ("gpt", "gpt6")
    tokens, _ = large.batch(0, 0)
    assert tokens.shape == (8, 256)
    assert len(large.build().blocks) == 6
    assert len(small.build().blocks) == 4
