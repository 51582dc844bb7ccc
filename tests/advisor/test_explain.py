"""`SwapEngine.save` and `cswap explain`."""

from __future__ import annotations

import json

import pytest
import torch

import cswap
from cswap.advisor.call_site import Site
from cswap.advisor.site_history import Explanation
from cswap.errors import ConfigError
from cswap.report import explain

pytest.importorskip("typer")

from typer.testing import CliRunner

from cswap import cli


@pytest.fixture
def saved(tmp_path):
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()
    )
    with cswap.install(model, min_bytes=0) as handle:
        for _ in range(4):
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
