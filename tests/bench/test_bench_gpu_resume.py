"""The GPU benchmarks go on where they stopped: killed, out of time, or with a broken device."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")

from bench.gpu import codecs, command, link, swap, tables, training
from bench.gpu.report import BrokenDeviceError, Deadline, OutOfTimeError, Report
from bench.workloads.methods import ORACLE

GPU = {"name": "made up"}
METER: Any = SimpleNamespace(synchronize=lambda: None)


@dataclass(frozen=True)
class Row:
    name: str


def report_of(folder, *, gpu=None, meter=METER, deadline=None):
    return Report(folder, "link", meter, gpu or GPU, deadline)


def measure(report, name, calls):
    def make():
        calls.append(name)
        return [Row(name)]

    report.measure(name, make, str)


def names(report):
    return [row["name"] for row in report.document["rows"]]


def test_a_killed_run_goes_on_with_the_next_measurement(tmp_path, forked):
    script = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from dataclasses import dataclass
from bench.gpu.report import Report
@dataclass
class Row:
    name: str
def killed():
    os.kill(os.getpid(), signal.SIGKILL)
meter = SimpleNamespace(synchronize=lambda: None)
report = Report(Path(sys.argv[1]), "link", meter, {"name": "made up"})
report.measure("one", lambda: [Row("one")], str)
report.measure("two", killed, str)
"""
    roots = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "kernels")]
    done = forked.run(f"import sys; sys.path[:0] = {roots}\n{script}", tmp_path)
    assert done.returncode == -signal.SIGKILL
    report = report_of(tmp_path)
    calls: list[str] = []
    assert not (tmp_path / "link.json").exists()
    for name in ("one", "two", "three"):
        measure(report, name, calls)
    assert calls == ["two", "three"]
    report.finish()
    document = json.loads((tmp_path / "link.json").read_text())
    assert [row["name"] for row in document["rows"]] == ["one", "two", "three"]
    assert document["complete"]


def test_a_finished_part_is_not_measured_again(tmp_path):
    report = report_of(tmp_path)
    calls: list[str] = []
    measure(report, "one", calls)
    report.finish()
    again = report_of(tmp_path)
    measure(again, "one", calls)
    again.finish()
    assert calls == ["one"]
    assert names(again) == ["one"]


def test_what_ends_the_process_twice_is_not_begun_again(tmp_path):
    def ends():
        raise SystemExit

    for _ in range(2):
        with pytest.raises(SystemExit):
            report_of(tmp_path).measure("bad", ends, str)
    report = report_of(tmp_path)
    report.measure("bad", ends, str)
    measure(report, "good", [])
    assert names(report) == ["good"]
    assert report.document["skipped"] == [
        {"what": "bad", "why": "the process ended 2 times while this was measured"}
    ]


def test_ctrl_c_does_not_count_against_a_measurement(tmp_path):
    def stop():
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            report_of(tmp_path).measure("one", stop, str)
    report = report_of(tmp_path)
    measure(report, "one", [])
    assert names(report) == ["one"]


def test_nothing_begins_that_might_not_end_in_time(tmp_path):
    report = report_of(tmp_path, deadline=Deadline(1.0))
    calls: list[str] = []
    with pytest.raises(OutOfTimeError, match="one may need 5 s"):
        measure(report, "one", calls)
    assert calls == []
    report = report_of(tmp_path, deadline=Deadline(60.0))
    measure(report, "one", calls)
    # From now on the longest measurement counts, not the first guess.
    report._partial.document["done"]["one"]["took_s"] = 50.0
    with pytest.raises(OutOfTimeError, match="two may need 75 s"):
        measure(report, "two", calls)
    assert calls == ["one"]


def test_results_of_another_gpu_are_kept_beside(tmp_path, capsys):
    measure(report_of(tmp_path), "one", [])
    other = report_of(tmp_path, gpu={"name": "other"})
    assert names(other) == []
    measure(other, "one", [])
    kept = json.loads((tmp_path / "link-before-1.partial.json").read_text())
    assert kept["environment"]["gpu"] == GPU
    assert "link-before-1.partial.json" in capsys.readouterr().out


def test_a_broken_device_ends_the_run_behind_the_failed_measurement(tmp_path):
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    report = report_of(tmp_path, meter=SimpleNamespace(synchronize=fail))
    calls: list[str] = []
    with pytest.raises(BrokenDeviceError, match="after bad"):
        report.measure("bad", fail, str)
    again = report_of(tmp_path)
    for name in ("bad", "good"):
        measure(again, name, calls)
    assert calls == ["good"]
    assert "illegal memory access" in again.document["skipped"][0]["why"]


def test_the_most_valuable_measurements_of_all_parts_come_first(tmp_path, monkeypatch):
    order = []
    for part in (codecs, link, swap, training):

        def run(_meter, report, plan, part=part):
            order.append((report.part, plan != part.Plan()))
            measure(report, "one", [])

        monkeypatch.setattr(part, "run", run)
    parts = ["codecs", "link", "swap", "training"]
    with monkeypatch.context() as patch:
        patch.setattr(tables, "markdown", lambda _: "")
        code = command.measure(METER, GPU, tmp_path, parts, Deadline(None))
    assert code == 0
    n_first = len(parts) - 1 + len(training.FIRST)
    assert order[:n_first] == [(part, True) for part in (*parts, *parts[-1:])]
    assert order[n_first:] == [(part, False) for part in parts]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{part}.json" for part in parts]


@pytest.mark.parametrize("only_first", [False, True])
def test_the_most_valuable_measurements_can_be_all(tmp_path, monkeypatch, only_first):
    plans = []

    def run(_meter, report, plan):
        plans.append(plan)
        measure(report, "one", [])

    monkeypatch.setattr(swap, "run", run)
    monkeypatch.setattr(tables, "markdown", lambda _: "")
    for _ in range(2):
        command.measure(METER, GPU, tmp_path, ["swap"], Deadline(None), only_first=only_first)
    assert plans[0] == swap.FIRST
    assert (swap.Plan() in plans) == (not only_first)
    document = json.loads((tmp_path / "swap.json").read_text("utf-8"))
    assert document["complete"]
    assert document["settings"].get("only_first", False) == only_first


def test_the_first_measurements_are_part_of_all():
    for plan in training.FIRST:
        assert set(plan.tasks) <= set(training.Plan().tasks)
        assert plan.methods[0].name == ORACLE
        assert all(method in training.ALL for method in plan.methods)
        assert plan.n_steps == training.Plan().n_steps
    assert set(link.FIRST.sizes) <= set(link.Plan().sizes)
    assert link.FIRST.within_s == link.Plan().within_s
    assert set(swap.FIRST.sizes) <= set(swap.Plan().sizes)
    assert swap.FIRST.rounds == swap.Plan().rounds
    assert set(codecs.FIRST.sweep) <= set(codecs.Plan().sweep)
    assert codecs.FIRST.within_s == codecs.Plan().within_s
