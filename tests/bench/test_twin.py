"""The twin: a GPU with a clock. Each run is a process, on a model of two blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.__main__ import app
from bench.drawing.steps import UNKNOWN
from bench.twin import largest, report
from bench.twin.methods import FIT, METHODS
from bench.twin.models import TINY
from bench.twin.policies import compared, hardware_of
from bench.twin.profiles import GIB, H200
from bench.twin.runs import ROOT, FailedError, call, rows

N_STEPS = 8
"""By default, the last two obey a plan."""
FREE_HOST = dict.fromkeys(("operator_s", "view_s", "python_s", "cuda_s", "launch_s", "wake_s"), 0.0)
NOTHING_COSTS = {
    "out": 1e18,
    "back": 1e18,
    "both": 1e18,
    "copy_s": 0.0,
    "codec": 1e9,
    "overlap": 0.0,
}


@cache
def _row(method: str, **options: Any) -> dict[str, Any]:
    return _run(method, **options)


def _run(method: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = call(
        "worker",
        {"model": TINY, "method": method, "profile": H200.name, "n_steps": N_STEPS, **options},
    )
    return found


TWO_RUNS = """
import json, os, sys
import numba, torch._dynamo  # which takes seconds: so the children need not
from bench.twin.worker import run

arguments, folder = json.loads(sys.argv[1]), sys.argv[2]
children = []
for name, draws in (("first", False), ("again", True)):
    pid = os.fork()
    if pid == 0:
        os.environ["CSWAP_CACHE_DIR"] = f"{folder}/{name}"
        others = [bytearray(n) for n in range(1, 9999, 7) if draws]  # so addresses differ
        with open(f"{folder}/{name}.json", "w") as out:
            json.dump(run(**arguments, draws=draws), out)
        os._exit(0)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
"""
"""Two runs in processes that are forked from one, before that is the twin."""


def test_two_runs_give_the_same_microseconds(tmp_path):
    # The first steps. The slow test has a plan, and two processes from the beginning.
    arguments = {"model": TINY, "method": "default", "profile": H200.name, "n_steps": 2}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CSWAP_")}
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_RUNS, json.dumps(arguments), tmp_path],
        env={**kept, **paths, "CSWAP_CALIBRATE": "0", "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, again = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("first", "again"))
    assert again.pop("spans")
    assert again == first
    assert first["cswap"]["swapped"] > 0


@pytest.mark.slow
def test_two_runs_with_a_plan_give_the_same_microseconds():
    again = _run("default", draws=True)
    assert again.pop("spans")
    assert again == _row("default")


@pytest.mark.slow
def test_checkpointing_takes_time_for_memory():
    plain, checkpoint = _row("plain"), _row("checkpoint")
    assert checkpoint["peak_bytes"] < plain["peak_bytes"]
    assert checkpoint["busy_s"]["compute"] > plain["busy_s"]["compute"]
    assert set(plain["busy_s"]) == {"compute"}


@pytest.mark.slow
def test_swapping_moves_what_it_frees_over_the_link():
    plain, raw = _row("plain"), _row("raw")
    stats = raw["cswap"]
    assert raw["peak_bytes"] < plain["peak_bytes"]
    assert stats["swapped"] > 0
    assert stats["fallbacks"] == 0
    moved = stats["by_codec"]["raw"]["encoded"] / len(raw["steps_s"])
    assert raw["link_s"]["out"] > moved / H200.out  # latencies, and the other direction


@pytest.mark.slow
def test_a_link_and_a_host_that_cost_nothing_leave_the_plain_step():
    free = _run("raw", remat=False, changes={**NOTHING_COSTS, "host": FREE_HOST})
    plain = _run("plain", changes={"host": FREE_HOST})
    assert free["cswap"]["swapped"] > 0
    assert free["step_s"] == pytest.approx(plain["step_s"], rel=0.01)


@pytest.mark.slow
def test_a_slow_link_takes_its_time():
    slow = _run("raw", changes={"out": 1e9, "back": 1e9, "both": 1e9})
    assert slow["step_s"] > slow["link_s"]["out"]
    assert slow["link_s"]["out"] > 5 * _row("raw")["link_s"]["out"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method):
    options: dict[str, Any] = {"n_steps": 60} if method.startswith("fit=") else {}
    if method == FIT:
        options["fit"] = (_row("checkpoint")["peak_bytes"] + _row("plain")["peak_bytes"]) // 2
    found = _row(method, **options)
    assert found["step_s"] > 0
    most = options.get("fit", _row("plain")["peak_bytes"])
    assert found["peak_bytes"] <= 1.02 * most, found["goal"]
    assert (found["predicted_bytes"] is not None) == ("; predicted " in (found["goal"] or ""))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "share", "is_held"),
    [
        ("unet", 0.75, True),
        ("unet", 0.4, False),
        ("resnet50", 0.3, True),
        ("moe", 0.85, True),
        ("gpt2-small-b4", 0.65, False),
    ],
)
def test_a_goal_is_held_or_refused(model, share, is_held):
    same = {"model": model, "profile": H200.name}
    plain = call("worker", {**same, "method": "plain", "n_steps": 3})["peak_bytes"]
    goal = {**same, "method": FIT, "fit": int(share * plain), "n_steps": 26}
    if not is_held:
        with pytest.raises(FailedError, match="the smallest goal that can be reached is"):
            call("worker", goal)
        return
    found = call("worker", goal)
    assert "obeying" in found["goal"]
    assert found["peak_bytes"] <= 1.001 * share * plain
    assert found["predicted_bytes"] == pytest.approx(found["peak_bytes"], rel=0.01)


@pytest.mark.slow
def test_too_small_a_device_is_a_row_with_its_reason():
    (found,) = rows(
        [
            {
                "model": TINY,
                "method": "plain",
                "profile": H200.name,
                "changes": {"device_bytes": 1 << 28},
            }
        ]
    )
    assert "out of memory" in found["failure"]
    document = {"rows": [found], "settings": {"profile": H200.name}}
    assert "out of memory" in report.cells(document)[0][2]
    assert report.table(document).row_count == 1


@pytest.mark.slow
def test_the_engine_follows_plans_for_the_trace_of_the_twin():
    # Positions of the trace are the engine's: all tensors are moved that the plan names.
    for row in compared(TINY, H200.name, ("none", "vdnn-all", "home")):
        actions, done = row["actions"], row["done"]
        moved = {"raw": actions.get("swap", 0), "remat": actions.get("recompute", 0)}
        assert done["moved"] == {codec: n for codec, n in moved.items() if n}
        assert done["fallbacks_by_reason"] == {}
        assert row["free_host"]["step_s"] == pytest.approx(row["predicted"]["step_s"], rel=0.3)
        assert done["peak_bytes"] == pytest.approx(row["predicted"]["peak_bytes"], rel=0.05)


def test_a_row_shows_its_plans_peak_beside_the_counted_one():
    figures = {"peak_bytes": 3 * GIB, "peak_of_all_bytes": 4 * GIB, "step_s": 0.1, "host_s": 0.05}
    link_s = {"out": 0, "back": 0}
    row = {"model": TINY, "method": "default", **figures, "link_s": link_s, "calls": {}}
    rows = [{**row, "predicted_bytes": 7 * GIB // 2}, {**row, "predicted_bytes": None}, row]
    document = {"rows": rows, "settings": {"profile": H200.name}}  # the last one is of an old file
    beside = report.HEADINGS.index("peak GiB")
    assert report.HEADINGS[beside + 1] == "predicted"
    found = [line[beside : beside + 2] for line in report.cells(document)]
    assert found == [["3.00", "3.50"], ["3.00", UNKNOWN], ["3.00", UNKNOWN]]
    assert all(len(line) == len(report.HEADINGS) for line in report.cells(document))
    assert [column.header for column in report.table(document).columns] == list(report.HEADINGS)


def test_a_prediction_that_is_off_does_not_hold():
    figures = {"step_s": 0.1, "peak_bytes": GIB}
    done = {**figures, "moved": {"raw": 3.0, "remat": 1.0}}
    row = {"model": TINY, "policy": "home", "budget_bytes": GIB, "actions": {"recompute": 2}}
    row |= {"predicted": figures, "free_host": done, "done": done}
    slow = {**row, "done": {**done, "step_s": 0.12}}
    large = {**row, "done": {**done, "peak_bytes": 1.2 * GIB}}
    failed = {**row, "done": {"failure": "out of memory"}}
    document = {"rows": [row, slow, large, failed], "settings": {"profile": H200.name}}
    lines = report.policy_cells(document)
    assert [line[-1] for line in lines] == ["yes", "no", "no", UNKNOWN]
    assert lines[0][3:6] == ["3", "1", "1"]
    assert lines[1][8:10] == ["+20.0%", "+0.0%"]
    assert report.policies(document).row_count == 4


@pytest.mark.parametrize("predicted", [2.0, 3.0, 0.5])
def test_the_largest_batch_is_one_that_trained(monkeypatch, predicted):
    usable, tried = 0.9 * H200.device_bytes, []

    def trained(_module, argument):
        each = {"plain": usable / 100, "checkpoint": usable / 300}.get(
            argument["method"], usable / 250
        )
        batch, nbytes = argument["batch"], argument["batch"] * each
        tried.append((argument["method"], batch))
        if nbytes > H200.device_bytes:
            raise FailedError("exit code 1: torch.OutOfMemoryError: out of memory")
        return {
            **argument,
            "peak_bytes": nbytes,
            "step_s": 0.01 * batch,
            "largest_batch": predicted,
        }

    monkeypatch.setattr(largest, "call", trained)
    rows = largest.largest("gpt2-medium", H200.name)
    plain, checkpointed, fitted = (row["batch"] for row in rows)
    assert 94 <= plain <= 100
    assert 281 <= checkpointed <= 300
    assert fitted == (plain if predicted < 1 else int(2 * plain) if predicted < 3 else fitted)
    assert plain <= fitted <= 250
    assert len(tried) < 40
    document = {"rows": [*rows[:2], {**rows[2], "step_s": 0.02 * fitted}], "settings": {}}
    (line,) = report.largest_cells(document)
    assert line[2:5] == [str(plain), str(checkpointed), str(fitted)]
    assert line[5:] == [f"{fitted / plain:.1f}", "1.00", "0.50"]
    assert report.largest(document).row_count == 1
    failed = {"rows": [{**row, "failure": "no batch fits"} for row in rows]}
    assert report.largest_cells(failed)[0][2:] == [UNKNOWN] * 6


def test_the_rates_of_plans_are_those_of_the_twin():
    found = hardware_of(H200)
    assert found.d2h_bytes_per_s * found.duplex_factor == pytest.approx(H200.both)
    assert found.codecs["zvc"].encode_bytes_per_s == H200.codec_rates("zvc")[0]


@pytest.mark.slow
def test_a_fault_of_order_ends_the_run():
    # A tensor that another stream reads is written while that may still run.
    program = """
import torch
from bench.twin.process import DEVICE, become
from bench.twin.profiles import H200
cuda = become(H200)
x, side = torch.empty(1 << 20, device=DEVICE), torch.cuda.Stream()
with torch.cuda.stream(side):
    y = x + 1
x.add_(1)
print(len(cuda.faults))
"""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert int(done.stdout) > 0, done.stderr


@pytest.mark.slow
def test_a_trace_has_a_lane_per_stream():
    found = report.chrome_trace(_run("raw", draws=True))
    lanes = [e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M"]
    assert len(lanes) >= 3
    assert found["otherData"]["simulated"] is True
    json.dumps(found)


@pytest.mark.slow
def test_the_command_writes_rows_a_picture_and_a_trace(tmp_path):
    out, drawn = tmp_path / "rows.json", tmp_path / "step.json"
    few = ["twin", "--models", TINY, "--methods", "plain,checkpoint", "--out"]
    result = CliRunner().invoke(app, [*few, str(out)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert [row["method"] for row in document["rows"]] == ["plain", "checkpoint"]
    assert document["optimum"][TINY][0]["step_s"] <= document["rows"][0]["step_s"]
    assert out.with_suffix(".png").stat().st_size > 0
    picture = out.with_suffix(".png").read_bytes()
    out.with_suffix(".png").unlink()
    result = CliRunner().invoke(app, ["twin", "--redraw", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.with_suffix(".png").read_bytes() == picture
    assert json.loads(out.read_text()) == document
    result = CliRunner().invoke(app, [*few, str(drawn), "--trace"])
    assert result.exit_code == 0, result.output
    assert json.loads(drawn.read_text())["otherData"]["method"] == "plain"


@pytest.mark.parametrize("option", ["--models", "--methods", "--profile"])
def test_an_unknown_name_is_one_line(option):
    result = CliRunner().invoke(app, ["twin", option, "nope"])
    assert result.exit_code == 2
    assert f"{option} 'nope': unknown nope; known are" in result.output


@pytest.mark.slow
def test_an_unknown_model_says_so():
    with pytest.raises(FailedError, match="no such"):
        call("worker", {"model": "no such", "method": "plain", "profile": H200.name})
