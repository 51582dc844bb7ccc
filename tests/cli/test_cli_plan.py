"""`cswap plan`, `cswap hardware`, and this machine as a profile."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import cswap
from cswap.advisor import calibration
from cswap.advisor.calibration import Calibration, CodecTimes, Link, machine_of
from cswap.advisor.fit import TimeModel
from cswap.errors import ConfigError, HardwareError
from cswap.plan.estimate import estimate
from cswap.plan.hardware import list_hardware, load_hardware
from cswap.plan.simulate import smallest_feasible_budget
from cswap.plan.simulator.lifetimes import live_bytes
from cswap.plan.this_machine import this_machine
from cswap.schema.plan import Plan

pytest.importorskip("typer")

from typer.testing import CliRunner

from cswap import cli


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": "200"})


@pytest.fixture
def trace(tmp_path):
    layers = [m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    made = estimate(model, torch.empty(4096, 256), torch.mean, hardware="v100-pcie3", min_bytes=0)
    path = tmp_path / "step.json"
    made.save(path)
    return path, made


def test_policies_are_compared_and_the_best_plan_is_written(trace, tmp_path):
    path, made = trace
    out, budget = tmp_path / "plan.json", int(0.8 * max(live_bytes(made)))
    options = ("--hardware", "v100-pcie3", "--budget", budget, "--policy", "all")
    result = invoke("plan", path, *options, "--time-limit", 0.3, "--out", out)
    assert result.exit_code == 0, result.output
    for policy in ("vdnn-all", "tvdnn-ilp", "home", "joint"):
        assert policy in result.output
    assert "Simulated" in result.output
    plan = Plan.parse(out)
    assert plan.policy != "none"
    assert plan.predicted["peak_bytes"] <= budget


def test_the_table_says_that_encodings_count_on_a_cpu(trace, tmp_path):
    path, made = trace
    profile = tmp_path / "cpu.json"
    replace(load_hardware("v100-pcie3"), unified=True).save(profile)
    options = ("--hardware", profile, "--budget", max(live_bytes(made)), "--time-limit", 0.3)
    result = invoke("plan", path, *options)
    assert result.exit_code == 0, result.output
    assert "encodings count in the budget" in result.output


def test_a_plan_that_does_not_fit_takes_one_line(trace):
    path, made = trace
    hardware = load_hardware("v100-pcie3")
    tight = ("--budget", smallest_feasible_budget(made, hardware))
    result = invoke("plan", path, "--hardware", "v100-pcie3", *tight, "--policy", "none,capuchin")
    assert result.exit_code == 0, result.output
    rows = [row for row in result.output.splitlines() if row.startswith(("none", "capuchin"))]
    assert ["no plan fits" in row for row in rows] == [True, False]


def test_rows_as_json(trace):
    path, made = trace
    options = ("--hardware", "v100-pcie3", "--policy", "none,joint", "--no-recompute", "--json")
    result = invoke("plan", path, *options, "--time-limit", 0.2)
    assert result.exit_code == 0, result.output
    rows = {row["policy"]: row for row in json.loads(result.output)}
    assert set(rows) == {"none", "joint"}
    assert rows["none"]["simulation"]["peak_bytes"] == max(live_bytes(made))
    actions = {d["action"] for d in rows["joint"]["plan"]["decisions"].values()}
    assert "recompute" not in actions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--hardware", "v100-pcie"), "Did you mean"),
        (("--policy", "jiont"), "Did you mean 'joint'"),
        (("--budget", "lots"), "budget"),
        (("--budget", "1KiB", "--policy", "joint"), "smallest"),
    ],
)
def test_wrong_arguments_are_named(trace, change, message):
    options = {"--hardware": "v100-pcie3", **dict(zip(change[::2], change[1::2], strict=True))}
    result = invoke("plan", trace[0], *(word for pair in options.items() for word in pair))
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_hardware_is_listed_and_shown():
    listed = invoke("hardware", "list")
    assert listed.exit_code == 0, listed.output
    assert all(name in listed.output for name in list_hardware())
    shown = json.loads(invoke("hardware", "show", "a100-pcie4").output)
    assert shown["sources"]
    assert load_hardware(shown) == load_hardware("a100-pcie4")


def test_this_machine_is_a_profile_once_it_is_calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path))
    calibration._read.cache_clear()
    with pytest.raises(HardwareError, match="cswap calibrate"):
        this_machine()
    model = TimeModel(1e-5, 1e-10, 0.0, 0.01)
    link = Link(1e10, 2e10, 1e-6, 0.7)
    times = {"zvc": CodecTimes(model, model), "raw": CodecTimes(model, model)}
    Calibration(machine_of("cpu"), times, link).save()
    found = this_machine()
    calibration._read.cache_clear()
    assert found.measured
    assert found.codecs["zvc"].encode_bytes_per_s == pytest.approx(1e10)
    assert "raw" not in found.codecs
    assert found.h2d_bytes_per_s == 2e10
    assert found.flops["float32"].achievable > 1e8
    assert load_hardware(found.to_dict()) == found
    assert cswap.load_hardware(found) is found
