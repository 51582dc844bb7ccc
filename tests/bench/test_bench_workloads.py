"""`python -m bench workloads`: other packages' models in every way; on a stand-in, and for real."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from bench.__main__ import app
from bench.frameworks import command, report
from bench.frameworks import measure as measuring
from bench.frameworks.catalogue import FIRST, SECOND, SETS, WORKLOADS
from bench.frameworks.measure import CSWAP, N_SETTLING, WAYS, Counted, measure
from bench.frameworks.models.workload import QUICK, Workload
from cswap.experiments import results_page


class Layers(nn.Module):
    """ReLU layers; returns the loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
            for _ in range(3)
        )
        self.checkpointed = False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return functional.mse_loss(x, torch.zeros_like(x))


def stand_in(_scale):
    net = Layers()

    def recompute():
        net.checkpointed = True

    def batch(step):
        return {"x": torch.randn(1024, 256, generator=torch.Generator().manual_seed(step))}

    return Workload(net, batch, recompute)


def no_checkpoints(scale):
    def refuse():
        raise NotImplementedError("no checkpoints\nhere")

    made = stand_in(scale)
    return Workload(made.model, made.batch, refuse)


def missing(_scale):
    raise AssertionError("its package is not there")


def broken(_scale):
    raise ValueError("broken")


def run(out, *arguments):
    words = ["workloads", "--quick", "--out", str(out), *arguments]
    return CliRunner().invoke(app, words, env={"COLUMNS": "250"})


@pytest.fixture
def workloads(monkeypatch):
    monkeypatch.setenv("CSWAP_CODEC", "zvc")
    monkeypatch.setattr(command, "N_THREADS", 1)
    for module in (measuring, command):  # steps before those that count
        monkeypatch.setattr(module, "N_SETTLING", 2)

    def use(**builders):
        packages = {missing: "no_such_package"}
        known = {name: (packages.get(made, "torch"), made) for name, made in builders.items()}
        monkeypatch.setattr(command, "WORKLOADS", known)
        return ["--workloads", ",".join(known)]

    return use


@pytest.mark.slow
def test_every_way_has_a_row_with_what_is_held(workloads, tmp_path):
    out = tmp_path / "w.json"
    result = run(out, *workloads(mlp=stand_in))
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert (document["kind"], document["complete"]) == ("workloads", True)
    assert set(document["packages"]) == set(command.PACKAGES)
    rows = {row["way"]: row for row in document["rows"]}
    assert list(rows) == list(WAYS)
    held = {way: row["held_of_plain"] for way, row in rows.items()}
    assert held["plain"] == 1.0
    assert held["cswap without remat"] < 0.9  # half of what ReLU gives is zeros
    assert held["checkpoint"] < 0.7  # one of two
    assert held["save_on_cpu"] > 0.9  # a copy from memory to memory
    lossless = [way for way in WAYS if way != "cswap int8"]
    assert all(rows[way]["bit_equal"] for way in lossless)
    assert rows["cswap without remat"]["encoded_bytes"] > 0
    assert all((row["gained_of_saved"] or 0) > 0.3 for way, row in rows.items() if way in CSWAP)
    assert rows["plain"]["gained_of_saved"] is None
    assert report.summary(document) in result.output


@pytest.mark.slow
def test_short_steps_are_counted_more_often(workloads, tmp_path):
    out = tmp_path / "w.json"
    options = workloads(mlp=stand_in)
    result = run(out, *options, "--ways", "checkpoint", "--steps", "1", "--seconds", "2")
    assert result.exit_code == 0, result.output
    plain, checkpoint = json.loads(out.read_text())["rows"]
    assert plain["n_steps"] == checkpoint["n_steps"] > 1
    assert plain["time_of_plain_spread"] is not None


@pytest.mark.slow
def test_bits_are_not_compared_where_plain_does_not_repeat_its_own(workloads, tmp_path):
    class Noisy(Layers):
        calls = 0

        def forward(self, x):  # as a kernel whose threads add in any order
            Noisy.calls += 1
            return super().forward(x) * (1 + 1e-6 * Noisy.calls)

    def noisy(scale):
        return Workload(Noisy(), stand_in(scale).batch, lambda: None)

    out = tmp_path / "w.json"
    result = run(out, *workloads(noisy=noisy), "--ways", "cswap without remat")
    assert result.exit_code == 0, result.output
    assert [row["bit_equal"] for row in json.loads(out.read_text())["rows"]] == [None, None]
    assert "plain differs from itself" in result.output


def test_both_bounds_say_when_enough_steps_are_counted():
    plain, other = SimpleNamespace(step_s=[9.0] * N_SETTLING), SimpleNamespace(step_s=[])
    both: list[Any] = [plain, other]
    assert Counted(1).goes_on(both)
    plain.step_s += [1.0, 1.0]
    assert not Counted(2).goes_on(both)
    assert Counted(3).goes_on(both)
    assert Counted(2, seconds=3.0).goes_on(both)
    other.step_s = [9.0] * N_SETTLING + [0.5, 0.5]
    assert not Counted(2, seconds=3.0).goes_on(both)


def test_what_cannot_run_says_why(workloads, tmp_path):
    out = tmp_path / "w.json"
    options = workloads(none=missing, fails=broken, partly=no_checkpoints)
    result = run(out, *options, "--ways", "checkpoint")
    assert result.exit_code == 0, result.output
    rows = [(r["workload"], r["way"], r["failure"]) for r in json.loads(out.read_text())["rows"]]
    assert rows == [
        ("none", "plain", "no_such_package is not installed"),
        ("fails", "plain", "cannot run (ValueError: broken)"),
        ("partly", "plain", None),
        ("partly", "checkpoint", "cannot run (NotImplementedError: no checkpoints)"),
    ]
    assert "no_such_package is not installed" in result.output


@pytest.mark.slow
def test_an_interrupted_run_goes_on(workloads, tmp_path, monkeypatch):
    out, options = tmp_path / "w.json", workloads(a=stand_in, b=stand_in)
    whole = measure

    def first_only(name, *arguments):
        if name == "b":
            raise KeyboardInterrupt
        return whole(name, *arguments)

    monkeypatch.setattr(command, "measure", first_only)
    result = run(out, *options, "--ways", "plain")
    assert result.exit_code == 130
    assert not out.exists()
    monkeypatch.setattr(command, "measure", lambda name, *rest: name == "b" and whole(name, *rest))
    result = run(out, *options, "--ways", "plain")
    assert result.exit_code == 0, result.output
    assert "Going on: a done before." in result.output
    assert [row["workload"] for row in json.loads(out.read_text())["rows"]] == ["a", "b"]


def test_a_report_has_its_table(workloads, tmp_path):
    result = run(tmp_path / "w.json", *workloads(mlp=stand_in), "--ways", "cswap")
    assert result.exit_code == 0, result.output
    page = results_page.write(tmp_path).read_text()
    assert "<td>mlp</td><td>plain</td>" in page
    assert "<td>mlp</td><td>cswap</td>" in page


def test_a_set_stands_for_its_workloads(workloads, tmp_path, monkeypatch):
    workloads(a=missing, b=missing, c=missing)
    monkeypatch.setattr(command, "SETS", {"first": ["a", "b"], "second": ["c"]})
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "OUT", {"second": tmp_path / "second.json"})
    for words, file, expected in (
        ([], "workloads.json", ["a", "b"]),
        (["--workloads", "second"], "second.json", ["c"]),
        (["--workloads", "second, a"], "workloads.json", ["c", "a"]),
    ):
        result = CliRunner().invoke(app, ["workloads", "--quick", "--again", *words])
        assert result.exit_code == 0, result.output
        document = json.loads((tmp_path / file).read_text())
        assert [row["workload"] for row in document["rows"]] == expected


def test_the_sets_have_no_workload_in_common():
    assert [*WORKLOADS] == [*FIRST, *SECOND]
    assert len(WORKLOADS) == len(FIRST) + len(SECOND)
    assert not SETS.keys() & WORKLOADS.keys()


@pytest.mark.parametrize("name", ["dlrm", "lstm"])  # which torch alone makes
def test_a_workload_of_torch_alone_gives_a_loss_and_its_checkpoints_the_same(name):
    made = WORKLOADS[name][1](replace(QUICK, nodes=64, tokens=4, width=32))
    losses, batch = [], made.batch(1)
    for _ in range(2):
        torch.manual_seed(0)
        loss = made.model.train()(**batch)
        loss.backward()
        losses.append(loss.item())
        made.recompute()
    assert losses[0] == losses[1]
    assert all(p.grad is not None for p in made.model.parameters())


def test_unknown_names_are_refused():
    for option in ("--workloads", "--ways"):
        result = CliRunner().invoke(app, ["workloads", option, "nonsuch"])
        assert result.exit_code == 2
        assert "known are" in result.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages' own
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "compile"])
def test_each_workload_of_an_installed_package_trains_bit_equal(name, tmp_path, monkeypatch):
    package, build = WORKLOADS[name]
    pytest.importorskip(package)
    monkeypatch.setattr(command, "N_THREADS", 1)
    ways = "cswap,checkpoint"
    result = run(tmp_path / "w.json", "--workloads", name, "--ways", ways, "--steps", "1")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "w.json").read_text())["rows"]
    assert [(row["way"], row["failure"], row["bit_equal"]) for row in rows] == [
        ("plain", None, True),
        ("cswap", None, True),
        ("checkpoint", None, True),
    ]
    assert build(QUICK).batch(N_SETTLING).keys() == build(QUICK).batch(1).keys()


def test_the_summary_counts_workloads_that_hold_less_and_those_that_take_little_longer():
    def row(name, held, time, way="cswap"):
        shares = {"held_of_plain": held, "peak_of_plain": held and held + 0.1}
        return {"workload": name, "way": way, **shares, "time_of_plain": time}

    rows = [row("a", 0.6, 1.05), row("b", 0.7, 1.2), row("c", 0.9, 1.0), row("d", None, None)]
    found = report.summary({"rows": [*rows, row("a", 0.1, 1.0, "cswap int8")]})
    assert "2 of 3 workloads: a, b." in found
    assert "1 take at most 1.10 of plain's time: a." in found
    assert found.endswith("The peak of a step is 0.70 to 1.00 of plain's.")
