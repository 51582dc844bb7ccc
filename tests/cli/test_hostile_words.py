"""Options, environment variables, names and single values that once ended in a traceback."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from functools import partial
from pathlib import Path

import pytest

import cswap
from cswap.advisor import calibration
from cswap.config import SwapConfig, parse_bytes
from cswap.errors import ConfigError, CswapError, HardwareError, TraceError, UnknownCodecError
from cswap.plan import planner
from cswap.plan.hardware import load_hardware
from cswap.report import explain, timeline
from cswap.schema.plan import Plan
from cswap.schema.trace import Trace

EXAMPLES = Path(__file__).parents[1] / "examples"
PROFILE = "rtx2080ti-cswap"

READERS = {
    "plan": Plan.parse,
    "trace": Trace.parse,
    "hardware": load_hardware,
    "record": explain.load,
    "timeline": timeline.load,
}

DEEP = "[" * 100_000 + "]" * 100_000

UNREADABLE = {
    "deep list": f'{{"a": {DEEP}}}'.encode(),
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "33 deep": b'{"a":' * 33 + b"1" + b"}" * 33,
    "UTF-16": '{"version": 1}'.encode("utf-16"),
    "Latin-1": '{"é": 1}'.encode("latin-1"),
    "byte order mark": '{"version": 1}'.encode("utf-8-sig"),
    "400 digits": b'{"version": ' + b"9" * 400 + b"}",
    "5000 digits": b'{"version": ' + b"9" * 5000 + b"}",
    "infinity": b'{"version": Infinity}',
    "NaN": b'{"version": NaN}',
    "1e400": b'{"version": 1e400}',
    "a key twice": b'{"version": 1, "version": 1}',
    "a list": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_plain_json_is_refused_in_one_line(reader, what, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(UNREADABLE[what])
    with pytest.raises(ConfigError) as caught:
        READERS[reader](path)
    text = str(caught.value)
    assert "file.json" in text
    assert text.isprintable()
    assert len(text) < 600


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("path", ["x" * 10_000, "a\0b", "/dev/null/x", "\udcff"])
def test_impossible_paths_are_refused(reader, path):
    with pytest.raises(ConfigError):
        READERS[reader](path)


def test_a_file_without_end_is_not_read_to_its_end():
    with pytest.raises(HardwareError, match="more than"):
        load_hardware("/dev/zero")


def changed(name, *path, value):
    """An example with one value changed; `value=KeyError` leaves the key out."""
    data = json.loads((EXAMPLES / f"{name}.json").read_text())
    *front, last = path
    parent = data
    for key in front:
        parent = parent[key]
    if value is KeyError:
        del parent[last]
    else:
        parent[last] = value
    return data


RECORDS = [
    (("sites",), KeyError, "sites=None: must be a list"),
    (("sites", 0, "codec"), KeyError, "sites[0].codec=None: must be text"),
    (("sites", 0, "saved_in"), 5, "sites[0].saved_in=5: must be text"),
    (("sites", 0, "profile", "nbytes"), "many", "sites[0].profile.nbytes='many'"),
    (("sites", 0, "candidates", 0, "ratio"), [], "sites[0].candidates[0].ratio=[]"),
    (("sites", 0, "candidates"), 7, "sites[0].candidates=7: must be a list"),
    (("sites", 0, "regret_s"), 1e300, "sites[0].regret_s=1e+300"),
    (("sites", 0), None, "sites[0]=None: must be an object"),
    (("notes",), [3], "notes[0]=3: must be text"),
    (("version",), True, "version True"),
]


@pytest.mark.parametrize(("path", "value", "message"), RECORDS, ids=[row[2] for row in RECORDS])
def test_a_record_for_explain_is_checked(path, value, message, tmp_path):
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(changed("stats", *path, value=value)))
    with pytest.raises(ConfigError) as caught:
        explain.load(file)
    assert message in str(caught.value)


TIMELINES = [
    (("traceEvents",), KeyError, "traceEvents=None: must be a list"),
    (("traceEvents", 0), 3, "traceEvents[0]=3: must be an object"),
    (("traceEvents", 0, "ph"), KeyError, "traceEvents[0].ph=None: must be one of"),
    (("traceEvents", 4, "args"), [], "traceEvents[4].args=[]"),
    (("traceEvents", 4, "args", "host"), 1.5, "traceEvents[4].args.host=1.5"),
    (("traceEvents", 4, "ts"), "soon", "traceEvents[4].ts='soon': must be a number"),
    (("otherData",), [], "not written by"),
]


@pytest.mark.parametrize(("path", "value", "message"), TIMELINES, ids=[row[2] for row in TIMELINES])
def test_a_timeline_for_report_is_checked(path, value, message, tmp_path):
    file = tmp_path / "timeline.json"
    file.write_text(json.dumps(changed("timeline", *path, value=value)))
    with pytest.raises(ConfigError) as caught:
        timeline.load(file)
    assert message in str(caught.value)


PLANS = [
    (("decisions", "0", "module"), 5, "plan.decisions['0'].module=5"),
    (("decisions", "0", "codec"), ["zvc"], "plan.decisions['0'].codec=['zvc']"),
    (("decisions", "0", "action"), ["swap"], "plan.decisions['0'].action=['swap']"),
    (("decisions", "0", "prefech"), 1, "plan.decisions['0'].prefech: no such field"),
    (("decisions", "²"), {"action": "keep"}, "plan.decisions['²']"),
    (("decisions", "01"), {"action": "keep"}, "plan.decisions['01']"),
    (("decisions", "1_0"), {"action": "keep"}, "plan.decisions['1_0']"),
    (("predicted", "step_s"), 10**400, "plan.predicted['step_s']=<integer of 1329 bits>"),
    (("predicted", "step_s"), float("inf"), "plan.predicted['step_s']=inf"),
    (("budget_bytes",), 10**400, "plan.budget_bytes=<integer of 1329 bits>"),
    (("order",), [1, 0], "plan.order: no such field"),
    (("hardware",), {}, "plan.hardware={}: must be text"),
    (("version",), True, "plan.version=True"),
    (("polcy",), "joint", "plan.polcy: no such field"),
]


@pytest.mark.parametrize(("path", "value", "message"), PLANS, ids=[row[2] for row in PLANS])
def test_a_plan_is_checked(path, value, message):
    with pytest.raises(ConfigError) as caught:
        Plan.parse(changed("plan", *path, value=value))
    assert str(caught.value).startswith(message)


def test_positions_may_be_numbers_and_are_taken_once():
    assert list(Plan.parse({"version": 3, "decisions": {2: {"action": "keep"}}}).decisions) == [2]
    twice = {2: {"action": "keep"}, "2": {"action": "keep"}}
    for wrong in (twice, {2.5: {"action": "keep"}}, {True: {"action": "keep"}}):
        with pytest.raises(ConfigError, match="position"):
            Plan.parse({"version": 3, "decisions": wrong})


def test_a_plan_is_not_cut_into_millions_of_sections():
    trace = Trace.parse(EXAMPLES / "trace.json")
    plan = {"version": 3, "decisions": {"0": {"action": "swap", "section_bytes": 1}}}
    with pytest.raises(ConfigError, match="Give larger section_bytes"):
        cswap.simulate(trace, load_hardware(PROFILE), Plan.parse(plan))


TRACES = [
    (("tensors", 0, "module"), 5, "trace.tensors[0].module=5: must be text"),
    (("operators", 0, "name"), None, "trace.operators[0].name=None: must be text"),
    (("operators", 0, "kind"), ["conv"], "trace.operators[0].kind=['conv']"),
    (("operators", 0, "duration_s"), 10**400, "trace.operators[0].duration_s=<integer of"),
    (("tensors", 0, "nbytes"), 10**400, "trace.tensors[0].nbytes=<integer of 1329 bits>"),
    (("tensors", 0, "nbytes"), 1 << 48, "trace: its tensors and workspaces have more than"),
    (("tensors", 0, "ratios"), {"zvc": 1e-300}, "trace.tensors[0].ratios['zvc']=1e-300"),
    (("tensors", 0, "profile"), {"zeros": "all"}, "trace.tensors[0].profile['zeros']='all'"),
    (("hardware",), 5, "trace.hardware=5: must be text"),
]


@pytest.mark.parametrize(("path", "value", "message"), TRACES, ids=[row[2] for row in TRACES])
def test_a_trace_is_checked(path, value, message):
    with pytest.raises(TraceError) as caught:
        Trace.parse(changed("trace", *path, value=value))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 5}, "hardware.name=5: must be text"),
        ({"memory_bytes": 10**400}, "memory_bytes=<integer of 1329 bits>"),
        ({"d2h_bytes_per_s": 1e-300}, "d2h_bytes_per_s=1e-300"),
        ({"sources": {"a": 5}}, "sources['a']=5: must be text"),
        ({"measured": "no"}, "measured='no': must be true or false"),
        ({"version": True}, "hardware.version=True"),
    ],
)
def test_a_profile_is_checked(change, message):
    with pytest.raises(HardwareError) as caught:
        load_hardware(load_hardware(PROFILE).to_dict() | change)
    assert message in str(caught.value)


# Our own caches: what is damaged is made anew, with one notice.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path))
    calibration._read.cache_clear()
    yield tmp_path
    calibration._read.cache_clear()


def put(path, text):
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(text)
    path.chmod(0o600)


CACHED = [
    *(b"null", b"\xff", DEEP.encode(), b'{"version": 3, "machine": MACHINE}'),
    b'{"version": 3, "machine": MACHINE, "times": {}, "left_out": {"zvc": 1}}',
    b'{"version": 3, "machine": MACHINE, "times": {"zvc": {"encode": {"overhead_s": '
    + b"9" * 400
    + b'}}}, "left_out": {}}',
]


@pytest.mark.parametrize("text", CACHED, ids=range(len(CACHED)))
def test_a_damaged_calibration_is_ignored_with_a_notice(text, cache, caplog):
    machine = calibration.machine_of("cpu")
    put(calibration.path_of(machine), text.replace(b"MACHINE", json.dumps(machine).encode()))
    with caplog.at_level(logging.WARNING, "cswap"):
        assert calibration.stored("cpu") is None
    assert caplog.text.count("is no calibration of this machine") == 1


@pytest.mark.parametrize("shape", [{"ranges": 3.7}, {"ranges": "3"}, {"ranges": 10**18}, [], None])
def test_damaged_launch_shapes_are_ignored_with_a_notice(shape, cache, caplog):
    machine = calibration.machine_of("cpu")
    record = {"version": 3, "machine": machine, "times": {}, "left_out": {}}
    put(calibration.path_of(machine), json.dumps(record | {"shapes": {"zvc": shape}}).encode())
    with caplog.at_level(logging.WARNING, "cswap"):
        assert calibration.stored("cpu") is None
    assert caplog.text.count("ignored") == 1


# Options and environment.

OPTIONS = [
    ("budget", "9" * 400),
    ("budget", 10**400),
    ("budget", "1e999"),
    ("min_bytes", "٣"),
    ("keep_last", "²"),
    ("keep_last", "9" * 5000),
    ("seed", -1),
    ("seed", 10**400),
    ("guard_error", 10**400),
    ("spill_dir", "x" * 10_000),
    ("spill_dir", "a\0b"),
    ("exclude", "[" * 100_000),
    ("exclude", ",".join("*a" for _ in range(100_000))),
    ("include", "*a" * 50_000),
    ("lossy", "x" * 100_000),
    ("verify", "x" * 100_000),
    ("codec", {"[" * 100_000: "zvc"}),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "value"), OPTIONS, ids=[row[0] for row in OPTIONS])
def test_absurd_options_are_refused_in_one_short_line(name, value):
    with pytest.raises(ConfigError) as caught:
        SwapConfig(**{name: value})
    assert str(caught.value).startswith(name)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, v in OPTIONS if isinstance(v, str) and "\0" not in v]
)
def test_absurd_variables_are_named(name, value, monkeypatch):
    monkeypatch.setitem(os.environ, f"CSWAP_{name.upper()}", value)
    with pytest.raises(ConfigError, match=f"CSWAP_{name.upper()}"):
        SwapConfig.resolve()


def test_sizes_in_text_are_exact():
    assert parse_bytes("9007199254740993", "budget") == 9007199254740993
    assert parse_bytes("1.5GiB", "budget") == 3 << 29


@pytest.mark.timeout(60)
def test_100_000_paths_may_be_excluded():
    paths = [f"layer.{i}.attention" for i in range(100_000)]
    assert SwapConfig(exclude=",".join(paths)).exclude == tuple(paths)


@pytest.mark.parametrize("name", ["zvc+" * 3000 + "zvc", "x" * 100_000, "zvc:" + "9" * 5000])
def test_endless_names_of_codecs_are_refused(name):
    with pytest.raises(ConfigError) as caught:
        cswap.get_codec(name)
    assert len(str(caught.value)) < 800
    assert isinstance(caught.value, UnknownCodecError) == (":" not in name)


@pytest.mark.parametrize("policy", ["home", "joint"])
@pytest.mark.parametrize("seed", [-1, 10**400, "1", True])
def test_a_wrong_seed_is_refused(policy, seed):
    with pytest.raises(ConfigError, match="seed="):
        planner.plan(EXAMPLES / "trace.json", "v100-pcie3", policy=policy, seed=seed)


# Through the command line.


@pytest.fixture
def refused(monkeypatch, capsys):
    """Run `cswap` with arguments that are wrong; the one line that it prints."""
    cli = pytest.importorskip("cswap.cli")

    def call(*arguments):
        words = [*map(str, arguments)]
        monkeypatch.setattr(sys, "argv", ["cswap", *words])
        app = importlib.import_module("bench.__main__").app
        run = partial(app, words[1:]) if words[0] == "bench" else cli.main
        with pytest.raises(SystemExit) as caught:
            run()
        out, err = capsys.readouterr()
        assert (caught.value.code, out, err.count("\n")) == (2, "", 1), err
        return err

    return call


TO_PLAN = ("plan", EXAMPLES / "trace.json", "--hardware", "v100-pcie3", "--policy")


def test_a_negative_seed_is_refused(refused):
    assert "seed=-1: must be" in refused(*TO_PLAN, "home", "--seed", "-1")


@pytest.mark.parametrize(
    "command",
    [
        (*TO_PLAN, "none", "--out"),
        *(("bench", name, "--out") for name in ("swap", "fit", "advisor", "codecs")),
    ],
    ids=lambda words: f"{words[0]} {words[1]}" if words[0] == "bench" else words[0],
)
def test_what_cannot_be_written_is_said_before_anything_runs(
    command, refused, tmp_path, monkeypatch, cache
):
    def runs(*_, **__):
        raise AssertionError("it ran")

    monkeypatch.setattr(planner, "compare", runs)
    monkeypatch.setattr("cswap.experiments.files.resumable.environment", runs)
    for wrong in (tmp_path, Path("/dev/null/folder/x.png")):
        line = refused(*command, wrong)
        assert str(wrong.parent) in line
        assert "cannot" in line or "is no file's name" in line


def test_a_cache_that_cannot_be_written_is_said_before_anything_is_measured(refused, monkeypatch):
    monkeypatch.setenv("CSWAP_CACHE_DIR", "/dev/null/cache")
    assert "CSWAP_CACHE_DIR" in refused("calibrate")
    assert "CSWAP_CACHE_DIR" in refused("tune", "zvc")
    monkeypatch.setenv("CSWAP_CACHE_DIR", "/tmp/" + "x" * 10_000)
    assert "too long" in refused("calibrate")


@pytest.mark.parametrize("command", ["explain", "report"])
@pytest.mark.parametrize("text", ['{"format": "cswap-stats", "version": 1}', DEEP, "\0"])
def test_what_explain_and_report_cannot_read_is_one_line(command, text, refused, tmp_path):
    file = tmp_path / "file.json"
    file.write_text(text)
    assert "file.json" in refused(command, file)


def test_errors_of_ours_are_one_line_whatever_they_name():
    assert str(CswapError("a\x1b[2J\nb\u202e")) == "a\\x1b[2J\\nb\\u202e"
