"""Names from models and files reach neither a terminal nor a page as commands or as markup."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import cswap
from cswap.advisor import calibration
from cswap.advisor.call_site import Site
from cswap.advisor.site_history import Explanation
from cswap.errors import BudgetError
from cswap.plan.planner import plan
from cswap.report import explain
from cswap.stats.counters import Counters
from cswap.stats.stats import CodecStats, Stats
from cswap.stats.stats_file import make_record

EVIL = "conv\x1b]8;;http://x\x07\x9b2J\u202e[bold]:smile:\r\n<b>\ud800"
"""A link, a cleared screen, letters that run backwards, markup, an emoji, half a character."""

SAFE = "conv\\x1b]8;;http://x\\x07\\x9b2J\\u202e[bold]:smile:\\r\\n<b>\\ud800"

EXAMPLES = Path(__file__).parents[1] / "examples"


def is_clean(text):
    return text.replace("\n", "").isprintable()


@pytest.fixture
def printed(monkeypatch, capsys):
    """Run `cswap` with arguments; what it prints, when nothing is wrong."""
    cli = pytest.importorskip("cswap.cli")
    monkeypatch.setenv("COLUMNS", "400")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["cswap", *map(str, arguments)])
        with suppress(SystemExit):
            cli.main()
        out, err = capsys.readouterr()
        assert err == ""
        assert is_clean(out)
        return out

    return call


@pytest.fixture
def swapped():
    model = torch.nn.Sequential()
    model.add_module(EVIL.replace(".", ""), torch.nn.Linear(256, 256))
    model.add_module("relu", torch.nn.ReLU())
    handle = cswap.install(model, min_bytes=0, codec="zvc")
    yield model, handle
    handle.remove()


def test_a_models_names_in_stats_explanations_and_reports(swapped, printed, tmp_path):
    model, handle = swapped
    with handle.engine.trace(tmp_path / "timeline.json"):
        model(torch.randn(64, 256)).sum().backward()
    handle.engine.save(tmp_path / "stats.json")
    texts = [str(handle.stats), *map(str, handle.engine.explain())]
    assert all(is_clean(text) for text in texts)
    assert any(SAFE in text for text in texts)
    assert SAFE in printed("explain", tmp_path / "stats.json")
    assert SAFE in printed("report", tmp_path / "timeline.json")


def test_printed_stats_and_explanations():
    stats = Stats(
        by_codec={EVIL: CodecStats()},
        guard_fallbacks={EVIL: 1},
        fallbacks_by_reason={EVIL: 1},
        packed=1,
        kept_bytes_by_reason={"subclass": 1},
        kept_by_reason={"subclass": 1},
        subclasses={EVIL: 1},
    )
    assert is_clean(str(stats))
    assert str(stats).count(SAFE) == 5
    explanation = Explanation(0, Site(EVIL), None, (), EVIL, EVIL)
    assert is_clean(str(explanation))


def test_every_text_of_a_record(printed, tmp_path):
    record = json.loads((EXAMPLES / "stats.json").read_text())
    site = record["sites"][0]
    site.update(saved_in=EVIL, reason=EVIL, codec=EVIL)
    site["candidates"][0]["codec"] = EVIL
    record["notes"] = [EVIL]
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(record))
    assert printed("explain", file).count(SAFE) == 4
    assert SAFE in printed("explain", file, "--position", site["position"])
    assert json.loads(printed("explain", file, "--json")) == record
    assert explain.load(file) == record


def test_names_in_a_timeline(printed, tmp_path):
    trace = json.loads((EXAMPLES / "timeline.json").read_text())
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            event["args"]["saved in"] = EVIL
    file = tmp_path / "\x1b[31m<i>.json"
    file.write_text(json.dumps(trace))
    assert SAFE in printed("report", file)


def test_names_in_a_calibration(printed, tmp_path, monkeypatch):
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path))
    machine = calibration.machine_of("cpu")
    record = json.loads((EXAMPLES / "calibration.json").read_text()) | {"machine": machine}
    record["times"][EVIL] = record["times"]["$x^{$"] = record["times"]["zvc"]
    record["left_out"] = {EVIL: EVIL}
    path = calibration.path_of(machine)
    path.parent.mkdir(mode=0o700)
    path.write_text(json.dumps(record))
    path.chmod(0o600)
    calibration._read.cache_clear()
    assert printed("calibrate", "--show").count(SAFE) == 4
    calibration._read.cache_clear()


def test_names_in_a_trace_and_a_profile(printed, tmp_path):
    trace = json.loads((EXAMPLES / "trace.json").read_text())
    for operator in trace["operators"]:
        operator["name"] = operator["module"] = EVIL
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    profile = cswap.load_hardware("v100-pcie3").to_dict() | {"name": EVIL}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    options = ("--hardware", tmp_path / "profile.json", "--policy", "none,vdnn-all")
    assert "Simulated." in printed("plan", tmp_path / "trace.json", *options)
    printed("plan", tmp_path / "trace.json", *options, "--json")
    printed("hardware", "show", tmp_path / "profile.json")
    with pytest.raises(BudgetError) as caught:
        plan(tmp_path / "trace.json", "v100-pcie3", 20_000_000, "none")
    assert is_clean(str(caught.value))


def test_a_foreign_codecs_documentation(printed, monkeypatch):
    pytest.importorskip("cswap.cli")
    row = cswap.cli.doctor_module.CodecRow("e\x1b[1mvil", True, None, (), (), EVIL)  # type: ignore[attr-defined]
    monkeypatch.setattr("cswap.doctor.survey_codecs", lambda _: (row,))
    assert SAFE in printed("codecs")
    finding = cswap.cli.doctor_module.Finding("p", True, False, EVIL, EVIL, EVIL)  # type: ignore[attr-defined]
    monkeypatch.setattr("cswap.doctor.examine", lambda: (finding,))
    assert printed("doctor").count(SAFE) == 3


def test_markup_in_an_argument_is_no_markup(monkeypatch, capsys, tmp_path):
    cli = pytest.importorskip("cswap.cli")
    pytest.importorskip("optuna")
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["cswap", "tune", "[/red]\x1b[31m"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert is_clean(err)


def test_warnings_of_ours(caplog):
    with caplog.at_level(logging.WARNING, "cswap"):
        Counters().fall_back("guard", EVIL)
        logging.getLogger("cswap").warning("The gradients of %r: %s", EVIL, EVIL)
        logging.getLogger("cswap").error("failed", exc_info=ValueError(EVIL))
    assert is_clean(caplog.text)
    assert caplog.text.count(SAFE) == 3
    assert caplog.text.count(SAFE.partition("\\n")[0]) == 4  # an error's own lines stay lines


def test_a_terminal_that_knows_few_characters_is_written_to_all_the_same(tmp_path):
    pytest.importorskip("typer")
    record = json.loads((EXAMPLES / "stats.json").read_text())
    record["notes"] = ["naïve 层"]
    (tmp_path / "stats.json").write_text(json.dumps(record))
    done = subprocess.run(
        [sys.executable, "-m", "cswap", "explain", str(tmp_path / "stats.json")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"na\\xefve \\u5c42" in done.stdout


# Benchmarks' results.


def a_result():
    environment = {"cpu": EVIL, "command": EVIL, "versions": {"torch": "2"}}
    rows = [{"model": EVIL, "method": "off", "step": {"median_s": 1.0}, "time_of_off": 1.0}]
    return {"kind": "swap", "version": 1, "environment": environment, "rows": rows}


def test_names_in_results_on_a_page(printed, tmp_path):
    pytest.importorskip("jinja2")
    rows = [{"model": EVIL, "seeds": 1, "validation_loss": 1.0, "spread": 1.0}]
    rows[0] |= {"accuracy": 1.0, "margin": 1.0}
    document = {**a_result(), "kind": "accuracy pilot", "rows": rows}
    (tmp_path / "a\x1b.json").write_text(json.dumps(document))
    (tmp_path / "b\x1b.json").write_text(json.dumps(a_result()))  # of no kind that it knows
    printed("bench", "report", tmp_path)
    assert is_clean((tmp_path / "report.html").read_text(encoding="utf-8"))


def test_a_saved_record_is_json_even_if_gradients_were_infinite(tmp_path):
    stats = Stats(packed=1, guard_worst_error=float("inf"), guard_worst_cosine=float("nan"))
    text = json.dumps(make_record(stats, []), allow_nan=False)
    (tmp_path / "stats.json").write_text(text)
    found = explain.load(tmp_path / "stats.json")
    assert found["stats"] == {
        **json.loads(json.dumps(asdict(Stats(packed=1)))),
        "ratio": 1.0,
        "guard_worst_error": None,
        "guard_worst_cosine": None,
    }
