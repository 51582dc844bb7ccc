"""`python -m bench accuracy`: end to end on small models, and its statistics."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from typer.testing import CliRunner

from bench.__main__ import app
from bench.accuracy.latency import raw_s, swap_s
from bench.accuracy.statistics import compare
from bench.accuracy.train import train as train_all
from cswap.plan.hardware import load_hardware


def run(out, *arguments):
    options = ["--quick", "--models", "cnn", "--seeds", "2", "--steps", "6", "--out", str(out)]
    return CliRunner().invoke(app, ["accuracy", *options, *arguments], env={"COLUMNS": "200"})


def test_policies_are_trained_compared_and_reported(tmp_path):
    result = run(tmp_path, "--policies", "lossless,int8")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["complete"]
    rows = {row["policy"]: row for row in found["summary"]}
    assert set(rows) == {"off", "lossless", "int8"}
    assert rows["lossless"]["bit_equal"]
    assert rows["lossless"]["loss"]["verdict"] == "equal"
    assert not rows["int8"]["bit_equal"]
    assert rows["int8"]["held_bytes"] < rows["lossless"]["held_bytes"] < rows["off"]["held_bytes"]
    errors = found["gradient_errors"]["cnn"]
    assert set(errors["lossless"].values()) == {0.0}
    assert max(errors["int8"].values()) > 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page  # opens without a network
    assert "int8" in (tmp_path / "table.md").read_text()


def test_an_interrupted_run_is_gone_on_with(tmp_path, monkeypatch):
    from bench.accuracy import command

    real, seeds = train_all, []

    def train(task, policies, seed, on_step):
        seeds.append(seed)
        if len(seeds) == 2:
            raise KeyboardInterrupt
        return real(task, policies, seed, on_step)

    monkeypatch.setattr(command, "train", train)
    assert run(tmp_path, "--policies", "int8").exit_code == 130
    assert run(tmp_path, "--policies", "int8").exit_code == 0
    assert seeds == [0, 1, 1]


def test_unknown_names_are_refused(tmp_path):
    for option in ("--models", "--policies"):
        result = CliRunner().invoke(app, ["accuracy", option, "nothing", "--out", str(tmp_path)])
        assert result.exit_code == 2
        assert "nothing" in result.output


def test_verdicts():
    off = [1.0, 1.2, 1.1]
    assert compare(off, off, lower_is_better=True).verdict == "equal"
    near = compare([1.01, 1.19, 1.12], off, lower_is_better=True)
    assert near.verdict == "within seed spread"
    assert near.low is not None
    assert near.high is not None
    assert near.low < near.mean < near.high
    assert compare([1.0, 1.2, 1.4], off, lower_is_better=True).verdict == "beyond seed spread"
    assert compare([0.5, 0.6, 0.5], off, lower_is_better=True).verdict == "within seed spread"
    assert compare([0.7, 0.9, 0.8], off, lower_is_better=False).verdict == "beyond seed spread"
    assert compare([1.1], [1.0], lower_is_better=True).verdict == "unknown"


def test_the_interval_is_students():
    found = compare([1.0, 3.0, 2.0], [0.0, 0.0, 0.0], lower_is_better=True)
    assert found.mean == 2.0
    assert found.high == pytest.approx(2.0 + 4.302653 / 3**0.5, rel=1e-5)  # t(0.975, 2), s = 1


def test_swap_latency_counts_codecs_and_both_directions():
    v100 = load_hardware("v100-pcie3")
    by_codec = {"zvc": {"raw": 2e9, "encoded": 1e9}}
    rate = v100.codecs["zvc"]
    expected = raw_s(1e9, v100) + 2e9 / rate.encode_bytes_per_s + 2e9 / rate.decode_bytes_per_s
    assert swap_s(by_codec, 2e9, v100) == pytest.approx(expected)
    assert swap_s({}, 2e9, v100) == pytest.approx(2e9 / 11.7e9 + 2e9 / 10.6e9)
