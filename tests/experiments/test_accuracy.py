"""`python -m bench accuracy`: end to end on small models, and its statistics."""

from __future__ import annotations

import io
import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from rich.console import Console
from typer.testing import CliRunner

from bench.__main__ import app
from cswap.errors import ConfigError
from cswap.experiments.accuracy import confirm, gradients, pictures, report, schedule
from cswap.experiments.accuracy.latency import raw_s, swap_s
from cswap.experiments.accuracy.margins import MARGINS, margin_of, stated
from cswap.experiments.accuracy.summary import current, summarise
from cswap.experiments.accuracy.tasks import make
from cswap.experiments.accuracy.train import Trained
from cswap.experiments.accuracy.train import train as train_all
from cswap.experiments.accuracy.verdict import EQUAL, UNDECIDED, WORSE
from cswap.experiments.launchers import Launcher
from cswap.experiments.workloads.tasks import make_task
from cswap.plan.hardware import load_hardware
from cswap.report import terminal
from cswap.stats.stats import CodecStats

SEEDS = range(5)
ROOT = Path(__file__).resolve().parents[2]


def run(out, *arguments):
    options = ["--quick", "--models", "cnn", "--seeds", "2", "--steps", "6", "--out", str(out)]
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
    errors = found["gradient_errors"]["cnn"]
    assert set(errors["lossless"].values()) == {0.0}
    assert max(errors["int8"].values()) > 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page  # opens without a network
    assert "int8" in (tmp_path / "table.md").read_text()


@pytest.mark.slow
def test_an_interrupted_run_is_gone_on_with(tmp_path, monkeypatch):
    from cswap.experiments.accuracy import sweep

    real, seeds = train_all, []

    def train(task, policies, seed, on_step, most_steps=None):
        seeds.append(seed)
        if len(seeds) == 2:
            raise KeyboardInterrupt
        return real(task, policies, seed, on_step)

    monkeypatch.setattr(sweep, "train", train)
    monkeypatch.setattr(report, "write", lambda *_: [])  # draws, which takes seconds
    assert run(tmp_path, "--policies", "int8").exit_code == 130
    assert run(tmp_path, "--policies", "int8").exit_code == 0
    assert seeds == [0, 1, 1]


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
        "gradient_errors": {},
        "environment": environment,
    }
    document["summary"] = summarise(document)
    row = document["summary"][1]
    assert row["verdict"] == WORSE
    assert row["accuracy_change"]["mean"] == 0.0
    assert set(row["simulated_swap"]) == {"v100-pcie3", "a100-pcie4", "h200-pcie5"}
    report.write(document, tmp_path)
    again = json.loads(json.dumps(document).replace("NaN", "null"))
    assert report.markdown(again) == report.markdown(document)
    line = next(line for line in report.markdown(document).splitlines() if "int4" in line)
    assert line.startswith(
        "| cnn, 5 | int4 | diverged | diverged | 0.1 | worse | 50.0 | +0.0 [+0.0, +0.0] |"
    )


def test_a_narrow_table_has_the_verdict_and_the_latency():
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    document = json.loads((ROOT / "bench/results/cpu/accuracy/results.json").read_text())
    terminal.show(report.table(document), drop=report.DROPPED, console=console)
    (line,) = [line for line in out.getvalue().splitlines() if "vit" in line and "int8" in line]
    assert "equal within the margin" in line
    assert re.search(r"\d\.\d\d \(-\d+ %\)", line)


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


def test_results_of_the_earlier_verdict_get_todays(tmp_path):
    runs = [
        run_of(p, seed, 1.0 + (p == "int4"), same_bits=p != "int4")
        for p in ("off", "lossless", "int4")
        for seed in range(3)
    ]
    settings = {"models": ["cnn"], "policies": ["off", "lossless", "int4"], "seeds": 3}
    document: dict[str, Any] = {
        "settings": {**settings, "quick": False, "data": "", "steps": None},
        "runs": runs,
        "summary": [{"policy": "int4", "loss": {"verdict": "within seed spread"}}],
    }
    found = current(document)
    verdicts = {row["policy"]: row["verdict"] for row in found["summary"][1:]}
    assert verdicts == {"lossless": EQUAL, "int4": UNDECIDED}
    assert any("Fewer than 5 seeds" in note for note in report.notes(found))
    assert current(found) is found


def test_pilot_runs_give_margins(tmp_path):
    # Two of its eight seeds; an unfinished file goes on.
    from cswap.experiments.accuracy import pilot

    settings = {"models": ["cnn"], "data": "", "steps": 4, "quick": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pilot, "PILOT_SEEDS", range(100, 102))
        pilot.command(
            settings,
            tmp_path,
            lambda _: make_task("cnn", quick=True, n_steps=4),
            Launcher(),
            Console(quiet=True),
        )
    found = json.loads((tmp_path / pilot.FILE).read_text())
    losses = [run["validation_loss"] for run in found["runs"]]
    assert found["rows"][0]["margin"] == margin_of(losses)
    assert [run["seed"] for run in found["runs"]] == [100, 101]
    assert found["rows"][0]["spread"] == pytest.approx(statistics.stdev(losses))


def test_margins_hold_for_the_tasks_as_they_are():
    own: dict[str, Any] = {"models": ["cnn", "gpt"], "data": "", "steps": None, "quick": False}
    assert stated(own, {}) == {model: MARGINS[model] for model in own["models"]}
    assert stated(own, {"gpt": 1.0}) == {"cnn": MARGINS["cnn"], "gpt": 1.0}
    for changed in ({"data": "hf:imdb"}, {"steps": 10}, {"quick": True}):
        assert stated(own | changed, {}) == {}
    assert stated(own | {"steps": 10}, {"cnn": 0.5}) == {"cnn": 0.5}


@pytest.mark.parametrize("text", ["x=0.1", "cnn=", "cnn=-1", "nan", "0"])
def test_a_wrong_margin_is_refused(text, tmp_path):
    done = run(tmp_path, "--margin", text)
    assert done.exit_code == 2
    assert "--margin" in done.output


def test_results_are_confirmed_by_the_bits_of_their_first_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "write", lambda *_: [])  # draws, which takes seconds
    short = ("--policies", "int8", "--steps", "4", "--seeds", "1")
    assert run(tmp_path, *short).exit_code == 0
    file = tmp_path / "results.json"
    document = json.loads(file.read_text())
    document["settings"]["quick"] = False  # a quick run is not confirmed
    document["environment"]["measures"] = {"paths": [], "files": {}}
    file.write_text(json.dumps(document))
    confirm.command(file, Console(quiet=True))
    confirmed = json.loads(file.read_text())
    assert confirmed["environment"]["measures"]["files"]
    assert confirmed["runs"] == document["runs"]
    document["runs"][0]["losses"][0] += 1e-6
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="other bits"):
        confirm.command(file, Console(quiet=True))
    assert json.loads(file.read_text()) == document


def test_the_schedules_have_the_same_mean_rate():
    by_name = {name: sum(rates) for name, rates in schedule.SCHEDULES.items()}
    assert by_name["sliding down"] == by_name["constant"] == by_name["sliding up"]
    assert by_name["lowest"] < by_name["constant"]
    down = schedule.SCHEDULES["sliding down"]
    assert list(down) == sorted(down, reverse=True)
    assert (down[0], down[-1]) == (schedule.TOP, schedule.BOTTOM)


@pytest.mark.slow
def test_the_schedule_experiment_runs_and_its_quick_run_decides_nothing(tmp_path, monkeypatch):
    pytest.importorskip("zfpy")
    rates = {"off": (), "sliding down": (11, 7, 3), "constant": (7,) * 3, "sliding up": (3, 7, 11)}
    monkeypatch.setattr(schedule, "SCHEDULES", {**rates, "lowest": (3,) * 3})
    monkeypatch.setattr(schedule, "EPOCHS", 3)
    out = tmp_path / "schedule.json"
    command = ["schedule", "--quick", "--seeds", "1", "--out", str(out)]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    rows = {row["schedule"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == list(schedule.SCHEDULES)
    held = {name: row["encoded_bytes_per_step"] for name, row in rows.items()}
    for name in ("constant", "sliding up"):
        assert held[name] == pytest.approx(held["sliding down"], rel=1e-3)
    assert held["sliding down"] > 2 * held["lowest"] > 0
    assert held["off"] == 0
    assert {row["verdict"] for row in rows.values()} == {UNDECIDED}


def test_a_codec_that_was_not_used_has_no_error_to_show(monkeypatch):
    task = make_task("cnn", quick=True, n_steps=2)
    model = task.build()
    monkeypatch.setenv("CSWAP_MIN_BYTES", "1KiB")
    found = gradients.errors(model, task, ("off", "lossless", "int8"), 0)
    assert set(found) == {"lossless", "int8"}
    exact, rounded = found["lossless"], found["int8"]
    assert exact is not None
    assert rounded is not None
    assert set(exact.values()) == {0.0}
    assert max(rounded.values()) > 0.0
    counts = {name: CodecStats(raw=100) for name in ("remat", "zvc", "int8")}
    handle = SimpleNamespace(
        engine=SimpleNamespace(synchronize=lambda: None), stats=SimpleNamespace(by_codec=counts)
    )
    assert gradients._lossy_bytes(handle) == 100
    monkeypatch.setattr(gradients, "_lossy_bytes", lambda _handle: 0.0)
    monkeypatch.setattr(gradients, "MOST_STEPS", 2)
    assert gradients.errors(model, task, ("int8",), 0) == {"int8": None}  # not zeros


def test_tensors_that_are_computed_again_count_among_the_eligible_ones():
    trained = Trained(make("gpt", quick=False, n_steps=8), "lossless", 0)
    for step in range(8):
        trained.step(step)
    run = trained.finish()
    assert run.by_codec["remat"]["raw"] > 0
    saved = sum(found["raw"] - found["encoded"] for found in run.by_codec.values())
    assert 0 < run.eligible_bytes - saved == run.held_bytes


@pytest.mark.filterwarnings("error")
def test_losses_of_no_run_are_drawn_without_a_warning(tmp_path):
    pictures.curves({"settings": {"models": ["cnn"]}, "runs": []}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0
