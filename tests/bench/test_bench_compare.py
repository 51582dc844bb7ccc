"""`python -m bench compare`: rows matched by name, judged by their spreads."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from bench.__main__ import app
from bench.files.compare import Verdict, compare, verdict
from bench.files.kinds import Figure, kind_of
from cswap.experiments.files.reading import load

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "cpu"

ENVIRONMENT = {
    "cpu": "some CPU",
    "n_cpus": 2,
    "load_average_before": [0.1, 0.2, 0.3],
    "versions": {"torch": "2.13.0"},
    "command": "python -m bench swap",
}


def timing(median_s):
    return {"median_s": median_s, "low_s": 0.9 * median_s, "high_s": 1.1 * median_s}


def row(method, step_s, **fields):
    return {
        "model": "cnn",
        "method": method,
        "step": timing(step_s),
        "time_of_off": 1.0,
        "ratio": 2.0,
        **fields,
    }


def document(*rows, **environment):
    return {
        "kind": "swap",
        "version": 1,
        "environment": {**ENVIRONMENT, **environment},
        "rows": list(rows),
    }


def run(tmp_path, a, b, *options):
    paths = []
    for name, content in (("a.json", a), ("b.json", b)):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        paths.append(str(path))
    return CliRunner().invoke(app, ["compare", *paths, *options], env={"COLUMNS": "200"})


def compared(a, b):
    """The comparison of two documents, as plain data."""
    return asdict(compare(a, b, kind_of(a, Path("a.json"))))


def refused(result):
    assert result.exit_code == 2
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_rows_are_matched_and_judged(tmp_path):
    a = document(row("off", 1.0), row("cswap raw", 1.0), row("checkpoint", 2.0), row("gone", 1.0))
    b = document(row("checkpoint", 1.0), row("off", 1.1), row("cswap raw", 1.3), row("new", 1.0))
    found = compared(a, b)
    steps = {line["key"][1]: line for line in found["lines"] if line["measure"] == "step"}
    assert {name: line["verdict"] for name, line in steps.items()} == {
        "off": "same within spread",
        "cswap raw": "more",
        "checkpoint": "less",
    }
    assert steps["checkpoint"]["ratio"] == 0.5
    assert steps["off"]["a"] == {"value": 1.0, "low": 0.9, "high": 1.1}
    assert (found["only_a"], found["only_b"]) == ([("cnn", "gone")], [("cnn", "new")])
    assert found["environment"] == []


def test_figures_of_the_data_are_compared_as_they_are(tmp_path):
    a, b = (document(row("off", 1.0, ratio=ratio)) for ratio in (2.0, 2.5))
    lines = {line["measure"]: line for line in compared(a, b)["lines"]}
    assert (lines["ratio"]["verdict"], lines["ratio"]["ratio"]) == ("more", 1.25)
    assert lines["time_of_off"]["verdict"] == "equal"


def test_a_figure_that_only_one_file_has_is_not_passed_over(tmp_path):
    # As of a run that diverged: its loss is null.
    def accuracy(loss):
        summary = [{"model": "cnn", "policy": "int4", "validation_loss": loss, "held_bytes": 8}]
        named = {"kind": "accuracy", "version": 1, "environment": ENVIRONMENT}
        return {**named, "summary": summary}

    found = compared(accuracy(0.5), accuracy(None))
    lines = {line["measure"]: line for line in found["lines"]}
    assert set(lines) == {"validation_loss", "held_bytes"}
    assert lines["validation_loss"]["verdict"] == "only one has it"
    assert lines["validation_loss"]["b"] is lines["validation_loss"]["ratio"] is None
    shown = run(tmp_path, accuracy(None), accuracy(0.5)).output
    assert "only one has it" in shown


def test_differences_of_the_environment_come_first(tmp_path):
    other = document(row("off", 1.0), cpu="another CPU", versions={"torch": "2.14.0"})
    result = run(tmp_path, document(row("off", 1.0)), other)
    assert result.exit_code == 0, result.output
    order = [result.output.index(text) for text in ("another CPU", "versions torch", "B / A")]
    assert order == sorted(order)
    assert "n_cpus" not in result.output


@pytest.mark.parametrize("measures", ["text", ["a"], {}, {"files": {"a.py": "1"}}])
def test_digests_of_the_measured_code_in_older_files_say_nothing_to_a_reader(measures, tmp_path):
    a, b = document(row("off", 1.0), measures={}), document(row("off", 1.0), measures=measures)
    assert compared(a, b)["environment"] == []


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (Figure(20.0, 19.0, 21.0), Verdict.MORE),
        (Figure(20.0, 11.0, 21.0), Verdict.SAME),
        (Figure(5.0, 4.0, 9.0), Verdict.SAME),
        (Figure(5.0, 4.0, 8.9), Verdict.LESS),
        (Figure(10.5), Verdict.MORE),
        (Figure(10.0), Verdict.EQUAL),
    ],
)
def test_spreads_that_overlap_say_nothing(b, said):
    assert verdict(Figure(10.0, 9.0, 11.0), b) is said


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda p: p.stem)
def test_committed_files_are_the_same_as_themselves(path):
    found = load(path)
    same = compare(found, copy.deepcopy(found), kind_of(found, path))
    assert {line.ratio for line in same.lines} <= {1.0, None}
    assert {line.verdict for line in same.lines} == {Verdict.EQUAL}
    assert (same.only_a, same.only_b, same.environment) == ([], [], [])


def test_an_older_overhead_file_is_compared_with_a_newer_one(tmp_path):
    old = {"kind": "overhead", "version": 1, "environment": ENVIRONMENT, "timings": {}}
    old |= {"microseconds": {"small": 2.0}}
    peer = {"hooks": "identity", "tensor": "64 B", "us": 0.1, "low_us": 0.1, "high_us": 0.1}
    new = {**old, "kind": "overhead", "version": 2, "microseconds": {"small": 1.0}, "rows": [peer]}
    found = compared(old, new)
    assert [(line["key"], line["ratio"]) for line in found["lines"]] == [(("cswap", "small"), 0.5)]
    assert found["only_b"] == [("identity", "64 B")]


def test_different_commands_are_refused(tmp_path):
    other = {"kind": "overhead", "environment": ENVIRONMENT, "microseconds": {"small": 2.0}}
    line = refused(run(tmp_path, document(row("off", 1.0)), other))
    assert "bench swap" in line
    assert "bench overhead" in line


def test_files_without_a_common_row_are_refused(tmp_path):
    line = refused(run(tmp_path, document(row("off", 1.0)), document(row("checkpoint", 1.0))))
    assert "no row in common" in line
    assert "cnn checkpoint" in line


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "has no 'environment'"),
        ('{"environment": {}}', "no known kind"),
        ('{"environment": {}, "kind": "nonsense"}', "no known kind ('nonsense')"),
        ('{"environment": {}, "kind": "swap", "version": 1}', "lacks 'rows'"),
    ],
)
def test_what_is_no_result_file_is_refused(content, said, tmp_path):
    other = content if "swap" in content else document(row("off", 1.0))
    assert said in refused(run(tmp_path, content, other))


def test_a_missing_file_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "no.json"), "x.json"])
    assert "no.json': cannot be read" in refused(result)


def test_two_rows_of_one_name_are_refused(tmp_path):
    twice = document(row("off", 1.0), row("off", 2.0))
    assert "two rows of cnn, off" in refused(run(tmp_path, twice, twice))
