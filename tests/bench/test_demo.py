"""The demo end to end on a tiny configuration, and the byte count its figures rest on."""

from __future__ import annotations

import importlib
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from bench.__main__ import app
from bench.demo.report import conclusions
from bench.workloads.tasks import make_task

ROOT = Path(__file__).parents[2]
MODES = ["off", "lossless", "remat", "int8", "checkpoint"]


def run_bench(*arguments: str):
    """Run `python -m bench` in this process: importing torch anew takes seconds."""
    n_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.demo.command.N_THREADS", 1)
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


def test_rows_hold_every_model_and_mode(demo):
    _, _, document = demo
    assert document["complete"] is True
    assert [(row["model"], row["method"]) for row in document["rows"]] == [
        (model, mode) for model in document["models"] for mode in MODES
    ]
    for row in document["rows"]:
        unknown = {key for key, value in row.items() if value is None}
        # Of a single counted step there are no quartiles; some C libraries have no heap's bytes.
        assert "failure" in unknown
        assert unknown <= {"failure", "time_of_off_spread", "heap_peak_bytes"}


def row(method, peak_saved_bytes, peak_of_off, time_of_off, *, bit_equal, model="gpt"):
    return {
        "model": model,
        "method": method,
        "peak_saved_bytes": peak_saved_bytes,
        "peak_of_off": peak_of_off,
        "time_of_off": time_of_off,
        "bit_equal": bit_equal,
    }


def test_the_last_sentences_have_bytes_and_times_beside_checkpointing():
    rows = [
        row("off", 10 << 20, 1.0, 1.0, bit_equal=True),
        row("lossless", 8 << 20, 0.8, 1.049, bit_equal=True),
        row("remat", 5 << 20, 0.5, 1.1, bit_equal=True),
        row("int8", 2 << 20, 0.2, 0.99, bit_equal=False),
        row("checkpoint", 4 << 20, 0.4, 1.31, bit_equal=True),
        row("off", 3 << 19, 1.0, 1.0, bit_equal=True, model="cnn"),
        row("remat", 1 << 20, 2 / 3, 1.2, bit_equal=False, model="cnn"),  # bits are not claimed
        row("off", 1 << 20, 1.0, 1.0, bit_equal=True, model="alone"),
    ]
    assert conclusions(rows) == [
        (
            "GPT, 10.0 MiB of saved tensors without: "
            "with one line 2.0 times less, every bit equal, at 1.10 times the time; "
            "with nothing computed again 1.2 times less, every bit equal, at 1.05 times the time; "
            "with int8 5.0 times less, at 0.99 times the time; "
            "by checkpointing 2.5 times less, at 1.31 times the time."
        ),
        (
            "CNN, 1.5 MiB of saved tensors without: "
            "with one line 1.5 times less, at 1.20 times the time."
        ),
    ]
    assert conclusions([]) == []


def test_lossless_and_checkpoint_have_the_bits_of_off_and_int8_has_not(demo):
    _, _, document = demo
    equal = {(row["model"], row["method"]): row["bit_equal"] for row in document["rows"]}
    differences = {(row["model"], row["method"]): row["max_grad_diff"] for row in document["rows"]}
    for model in document["models"]:
        for mode in ("off", "lossless", "checkpoint"):
            assert (equal[model, mode], differences[model, mode]) == (True, 0.0)
        assert not equal[model, "int8"]
        assert differences[model, "int8"] > 0


def test_swapping_holds_fewer_bytes_than_off(demo):
    # not the peaks: how much waits to be encoded at a moment depends on the machine's load
    _, _, document = demo
    rows = {(row["model"], row["method"]): row for row in document["rows"]}
    for model in document["models"]:
        off, lossless, _, int8 = (rows[model, mode] for mode in MODES[:4])
        assert 1 == off["ratio"] <= lossless["ratio"] < int8["ratio"]
        assert int8["held_bytes"] < off["held_bytes"]
    if "cnn" in document["models"]:
        assert rows["cnn", "lossless"]["ratio"] > 1.5  # half of what a ReLU lets through is zero


def test_environment_picture_and_sentence_are_there(demo):
    out, output, document = demo
    assert {"cpu", "versions", "cswap_commit", "command"} <= document["environment"].keys()
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    last = output.strip().splitlines()[-1]
    for words in ("MiB of saved tensors without", "with one line", "with int8", "by checkpointing"):
        assert words in last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--modes", "off,int7"), "unknown int7; known are off, lossless, remat, int8, checkpoint"),
        (("--models", ""), "names nothing; known are cnn, gpt"),
        (("--steps", "0"), "--steps"),
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


def test_the_larger_gpt_is_larger():
    small, large = (make_task(name, quick=False, n_steps=1) for name in ("gpt", "gpt6"))
    assert (small.name, large.name) == ("gpt", "gpt6")
    tokens, _ = large.batch(0, 0)
    assert tokens.shape == (8, 256)
    assert len(large.build().blocks) == 6
    assert len(small.build().blocks) == 4
