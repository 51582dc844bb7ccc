"""`python -m bench accuracy`: end to end on small models, and its statistics."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from bench.accuracy.statistics import compare
from typer.testing import CliRunner

from bench.__main__ import app
from bench.accuracy import report
from bench.accuracy.latency import raw_s, swap_s
from bench.accuracy.summary import summarise
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


def test_the_interval_is_that_of_a_paired_t_test():
    from scipy import stats

    mine, off = [1.3, 0.9, 1.7, 1.1, 1.45], [1.0, 1.0, 1.2, 1.15, 1.3]
    found = compare(mine, off, lower_is_better=True)
    interval = stats.ttest_rel(mine, off).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_run_that_diverged_is_never_within_the_spread(wrong):
    for mine in ([1.0, wrong], [wrong, 1.0]):
        assert compare(mine, [1.0, 2.0], lower_is_better=True).verdict == "diverged"
    assert compare([1.0, 1.0], [1.0, wrong], lower_is_better=False).verdict == "diverged"


def test_diverged_runs_are_reported_from_the_file(tmp_path):
    def run_of(policy, seed, loss):
        return {
            "model": "cnn",
            "policy": policy,
            "seed": seed,
            "losses": [2.0, 1.0],
            "validation_loss": loss,
            "accuracy": 0.5,
            "same_bits": False,
            "eligible_bytes": 1e6,
            "held_bytes": 5e5,
            "by_codec": {"zvc": {"raw": 1e6, "encoded": 5e5, "encode_s": 1e-3, "decode_s": 1e-3}},
        }

    runs = [
        run_of(p, seed, None if p == "int4" else 1.0) for p in ("off", "int4") for seed in (0, 1)
    ]
    environment = {"cpu": "x", "n_cpus": 2, "versions": {"torch": "2"}}
    environment |= {"cswap_commit": "c", "command": "python", "started": "now"}
    document: dict[str, Any] = {
        "settings": {"models": ["cnn"], "policies": ["off", "int4"]},
        "runs": runs,
        "gradient_errors": {},
        "environment": environment,
    }
    document["summary"] = summarise(document)
    row = document["summary"][1]
    assert row["loss"]["verdict"] == "diverged"
    assert row["accuracy_change"]["verdict"] == "equal"
    assert set(row["simulated_swap"]) == {"v100-pcie3", "a100-pcie4", "h200-pcie5"}
    report.write(document, tmp_path)
    again = json.loads(json.dumps(document).replace("NaN", "null"))
    assert report.markdown(again) == report.markdown(document)
    line = next(line for line in report.markdown(document).splitlines() if "int4" in line)
    assert line.startswith(
        "| cnn | int4 | diverged | diverged | 50.0 | +0.0 [+0.0, +0.0] | diverged |"
    )


def test_fewer_steps_than_are_left_out_are_refused(tmp_path):
    result = CliRunner().invoke(app, ["accuracy", "--steps", "3", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "--steps 3" in result.output


def test_swap_latency_counts_codecs_and_both_directions():
    v100 = load_hardware("v100-pcie3")
    by_codec = {"zvc": {"raw": 2e9, "encoded": 1e9}}
    rate = v100.codecs["zvc"]
    expected = raw_s(1e9, v100) + 2e9 / rate.encode_bytes_per_s + 2e9 / rate.decode_bytes_per_s
    assert swap_s(by_codec, 2e9, v100) == pytest.approx(expected)
    assert swap_s({}, 2e9, v100) == pytest.approx(2e9 / 11.7e9 + 2e9 / 10.6e9)
