"""`python -m bench accuracy`: end to end on small models, and its statistics."""

from __future__ import annotations

import io
import json
import re
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from rich.console import Console
from typer.testing import CliRunner

from bench.__main__ import app
from bench.accuracy.tasks import make
from bench.workloads.tasks import make_task
from cswap.experiments.accuracy import pictures, pilot, report
from cswap.experiments.accuracy.latency import raw_s, swap_s
from cswap.experiments.accuracy.pilot import margin_of
from cswap.experiments.accuracy.study import QUICK, Study, settings_of
from cswap.experiments.accuracy.summary import summarise
from cswap.experiments.accuracy.train import Trained
from cswap.experiments.accuracy.verdict import UNDECIDED, WORSE
from cswap.plan.hardware import load_hardware

SEEDS = range(5)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setitem(QUICK, "steps", 6)


def run(out, *arguments):
    options = ["--quick", "--models", "cnn", "--seeds", "2", "--out", str(out)]
    return CliRunner().invoke(app, ["accuracy", *options, *arguments], env={"COLUMNS": "200"})


def run_of(policy, seed, loss, *, same_bits=False):
    """A run as a result file has it."""
    return {
        "model": "cnn",
        "policy": policy,
        "seed": seed,
        "losses": [2.0, 1.0],
        "validation_loss": loss,
        "accuracy": 0.5,
        "same_bits": same_bits,
        "eligible_bytes": 1e6,
        "held_bytes": 5e5,
        "by_codec": {"zvc": {"raw": 1e6, "encoded": 5e5, "encode_s": 1e-3, "decode_s": 1e-3}},
    }


@pytest.mark.slow
def test_policies_are_trained_compared_and_reported(tmp_path):
    result = run(tmp_path, "--policies", "lossless,int8")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["complete"]
    rows = {row["policy"]: row for row in found["summary"]}
    assert set(rows) == {"off", "lossless", "int8"}
    assert rows["lossless"]["bit_equal"]
    assert rows["lossless"]["verdict"] == UNDECIDED  # a quick run decides nothing, and says so
    assert "decides nothing" in result.output
    assert not rows["int8"]["bit_equal"]
    assert rows["int8"]["held_bytes"] < rows["lossless"]["held_bytes"] < rows["off"]["held_bytes"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page  # opens without a network


def test_unknown_names_are_refused(tmp_path):
    for option in ("--models", "--policies"):
        result = CliRunner().invoke(app, ["accuracy", option, "nothing", "--out", str(tmp_path)])
        assert result.exit_code == 2
        assert "nothing" in result.output


def test_diverged_runs_are_reported_from_the_file(tmp_path):
    runs = [
        run_of(p, seed, None if p == "int4" else 1.0) for p in ("off", "int4") for seed in SEEDS
    ]
    environment = {"cpu": "x", "n_cpus": 2, "versions": {"torch": "2"}}
    environment |= {"cswap_commit": "c", "command": "python", "started": "now"}
    document: dict[str, Any] = {
        "settings": {
            "models": ["cnn"],
            "policies": ["off", "int4"],
            "quick": False,
            "seeds": {"cnn": len(SEEDS)},
            "margins": {"cnn": 0.1},
        },
        "runs": runs,
        "environment": environment,
    }
    document["summary"] = summarise(document)
    row = document["summary"][1]
    assert row["verdict"] == WORSE
    assert row["accuracy_change"]["mean"] == 0.0
    assert set(row["simulated_swap"]) == {"v100-pcie3", "a100-pcie4", "h200-pcie5"}
    pictures.pareto(document, tmp_path / "pareto.png")
    again = json.loads(json.dumps(document).replace("NaN", "null"))
    assert report.grids(again) == report.grids(document)
    _, line = report.rows(document)
    assert line[:8] == (
        *("cnn, 5", "int4", "diverged", "diverged", "0.1", "worse", "50.0"),
        "+0.0 [+0.0, +0.0]",
    )


def test_a_narrow_table_has_the_verdict_and_the_latency():
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    document = json.loads((ROOT / "bench/results/cpu/accuracy/results.json").read_text())
    report.table(document).show(console, drop=report.DROPPED)
    (line,) = [line for line in out.getvalue().splitlines() if "vit" in line and "int8" in line]
    assert "equal within the margin" in line
    assert re.search(r"\d\.\d\d \(-\d+ %\)", line)


def test_swap_latency_counts_codecs_and_both_directions():
    v100 = load_hardware("v100-pcie3")
    by_codec = {"zvc": {"raw": 2e9, "encoded": 1e9}}
    rate = v100.codecs["zvc"]
    expected = raw_s(1e9, v100) + 2e9 / rate.encode_bytes_per_s + 2e9 / rate.decode_bytes_per_s
    assert swap_s(by_codec, 2e9, v100) == pytest.approx(expected)
    assert swap_s({}, 2e9, v100) == pytest.approx(2e9 / 11.7e9 + 2e9 / 10.6e9)


def test_a_run_of_few_seeds_without_a_margin_says_what_it_cannot_decide():
    settings = settings_of({"cnn": None}, ["int4"], 3, steps=None, quick=False)
    few, none, _ = report.notes({"settings": settings})
    assert "Fewer than 5 seeds" in few
    assert "No margin was stated for cnn" in none


def test_pilot_runs_give_margins(tmp_path, monkeypatch):
    # Two of its eight seeds.
    monkeypatch.setattr(pilot, "PILOT_SEEDS", range(100, 102))
    settings = settings_of({"cnn": None}, [], None, steps=4, quick=True)
    make = partial(make_task, quick=True, n_steps=4)
    pilot.command(Study(settings, make, tmp_path, 1, Console(quiet=True)))
    found = json.loads((tmp_path / pilot.FILE).read_text())
    losses = [run["validation_loss"] for run in found["runs"]]
    assert found["rows"][0]["margin"] == margin_of(losses)
    assert [run["seed"] for run in found["runs"]] == [100, 101]
    assert found["rows"][0]["spread"] == pytest.approx(statistics.stdev(losses))


def test_tensors_that_are_computed_again_count_among_the_eligible_ones():
    trained = Trained(make("gpt", n_steps=8), "lossless", 0)
    for step in range(8):
        trained.step(step)
    run = trained.finish()
    assert run.by_codec["remat"]["raw"] > 0
    saved = sum(found["raw"] - found["encoded"] for found in run.by_codec.values())
    assert 0 < run.eligible_bytes - saved == run.held_bytes
