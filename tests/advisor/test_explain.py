"""`SwapEngine.save` and `cswap explain`."""

from __future__ import annotations

import json

import pytest
import torch

import cswap
from cswap.advisor.advisor import Advisor
from cswap.advisor.call_site import Site
from cswap.advisor.site_history import Explanation
from cswap.codecs.tolerance import EXACT
from cswap.config import SwapConfig
from cswap.errors import ConfigError
from cswap.fit import explained as why
from cswap.report import explain

pytest.importorskip("typer")

from typer.testing import CliRunner

from cswap import cli


@pytest.fixture
def saved(tmp_path, by_price):
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()
    )
    with cswap.install(model, min_bytes=0) as handle:
        for _ in range(2):  # before the choices are made again, by times of a busy machine
            model(torch.randn(256, 512)).square().sum().backward()
    path = tmp_path / "stats.json"
    handle.engine.save(path)
    return path


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["explain", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_saved_record_has_every_call_site_with_what_was_predicted_and_measured(saved):
    record = explain.load(saved)
    assert record["stats"]["swapped"] > 0
    rows = list(explain.site_rows(record))
    assert len(rows) == len(record["sites"])
    assert all(len(row) == len(explain.COLUMNS) for row in rows)
    swapped = [site for site in record["sites"] if site["codec"] != "keep"]
    assert any(site["measured"][0]["device_s"] > 0 for site in swapped)
    assert any(site["measured_cost_s"] for site in swapped)


def test_the_table_names_sites_codecs_and_regret(saved):
    result = invoke(saved)
    assert result.exit_code == 0, result.output
    assert "regret" in result.output
    assert "zvc" in result.output
    assert "call sites" in result.output


def test_one_call_sites_candidates(saved):
    record = explain.load(saved)
    site = next(s for s in record["sites"] if s["candidates"])
    result = invoke(saved, "--position", site["position"])
    assert result.exit_code == 0, result.output
    for candidate in site["candidates"]:
        assert candidate["codec"] in result.output
    assert "<-" in result.output
    assert json.loads(invoke(saved, "--json").output) == record


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object, not a list"),
        ('{"format": "cswap-stats", "version": 99}', "version 99"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        explain.load(path)


def test_an_unknown_position_is_refused(saved):
    with pytest.raises(ConfigError, match="position=999"):
        list(explain.candidate_rows(explain.load(saved), 999))


def test_without_a_round_trip_there_is_no_regret():
    explanation = Explanation(0, Site(), None, (), "zvc", "forced")
    assert explanation.measured_cost_s is None
    assert explanation.regret_s is None


def blocks(n):
    return torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(n))
    )


def rows_of(handle, tmp_path, **options):
    handle.engine.save(tmp_path / "stats.json")
    record = explain.load(tmp_path / "stats.json")
    rows = explain.site_rows(record, **options)
    return record, [dict(zip(explain.COLUMNS, row, strict=True)) for row in rows]


def test_like_call_sites_of_blocks_are_one_row(tmp_path):
    model = blocks(6)
    with cswap.install(model, min_bytes=0, codec="zvc", remat=False) as handle:
        for _ in range(2):
            model(torch.randn(256, 256)).square().sum().backward()
    record, rows = rows_of(handle, tmp_path, blocks=True)
    assert len(rows) < len(record["sites"])
    assert sum(int(row["n"]) for row in rows) == len(record["sites"])
    mib = sum(site["nbytes"] for site in record["sites"]) / 2**20
    assert sum(float(row["MiB"]) for row in rows) == pytest.approx(mib, abs=0.01 * len(rows))
    assert {row["saved in"] for row in rows} >= {"*.1"}
    _, each = rows_of(handle, tmp_path)
    assert [int(row["#"]) for row in each] == [site["position"] for site in record["sites"]]
    printed = invoke(tmp_path / "stats.json")
    assert len(printed.output.splitlines()) < len(record["sites"]) + 2
    for form in ("csv", "json"):
        assert "*" not in invoke(tmp_path / "stats.json", "--format", form).output


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("a.10.b", "a.*.b"),
        ("10", "*"),
        ("h.3", "h.*"),
        ("a.1.2", "a.*.2"),
        ("a.1.b.2.c", "a.*.b.*.c"),
        ("a1.b", "a1.b"),
        ("a.1b", "a.1b"),
        ("", ""),
    ],
)
def test_numbers_of_a_path(path, block):
    site = {"saved_in": path, "position": 0, "codec": "raw", "reason": "", "candidates": []}
    found = list(explain.site_rows({"sites": 2 * [{**site, "measured": []}]}, blocks=True))
    assert [row[1] for row in found] == [block]


def test_a_tensor_that_is_computed_again_has_no_earlier_decision_beside_it():
    advisor, x, site = Advisor(SwapConfig(), None), torch.randn(1 << 18), Site("block.0")
    advisor.choose(x, site, 0, tolerance=EXACT, may_keep=True)
    (before,) = advisor.explain()
    assert advisor.pays_again(site, 0, x.nbytes, 1e-9, "cpu")
    (found,) = advisor.explain()
    assert (found.codec, found.nbytes) == ("remat", x.nbytes)
    assert not advisor.pays_again(site, 0, x.nbytes, 1e3, "cpu")  # not worth it any more
    assert advisor.explain() == [before]


def test_with_a_goal_the_rows_are_those_of_its_plan(tmp_path):
    model = blocks(6)
    with cswap.install(model, min_bytes=0, fit="min", slowdown=3.0) as handle:
        for _ in range(30):
            model(torch.randn(512, 256)).square().sum().backward()
        goal = handle.goal
        assert goal is not None
        assert goal.phase == "obeying"
        record, rows = rows_of(handle, tmp_path)
        schedule = handle.schedule
    stay = {row["why"] for row in rows if row["codec"] == "keep"}
    assert stay <= {why.NO_OTHER, why.FREE}
    assert {row["why"] for row in rows if row["codec"] != "keep"} & {why.FASTEST, why.SMALLER}
    for codec, count in goal.actions.items():
        assert [row["codec"] for row in rows].count(codec) == count
    others = [row for row in rows if row["codec"] != "keep"]
    assert others
    assert all(float(row["predicted us"]) > 0 for row in others)
    assert any(row["next best"] for row in rows)
    # From a file, the times of other ways are not known.
    model = blocks(6)
    with cswap.install(model, min_bytes=0, fit="min", slowdown=3.0, schedule=schedule) as handle:
        model(torch.randn(512, 256)).square().sum().backward()
        again, _ = rows_of(handle, tmp_path)
    assert [s["codec"] for s in again["sites"]] == [s["codec"] for s in record["sites"]]
    assert not any(site["candidates"] for site in again["sites"])
    assert {site["reason"] for site in again["sites"]} == {why.FROM_FILE}
