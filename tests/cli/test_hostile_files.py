"""Files that were damaged, or made to do harm: a right object, or one line that says what is wrong.

The committed examples and results are mutated: bits flipped, cut off, other encodings, values
of other types and sizes, keys renamed, doubled or left out, deep nesting, absurd numbers.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import logging
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cswap.advisor import calibration
from cswap.codecs import cubins
from cswap.errors import CswapError
from cswap.plan.hardware import load_hardware
from cswap.plan.planner import compare
from cswap.plan.simulate import simulate
from cswap.report import calibration as calibration_report
from cswap.report import explain, planning, timeline
from cswap.schema.plan import Plan
from cswap.schema.trace import Trace
from cswap_kernels.cuda.compiler import Cubin

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES = Path(__file__).parents[1] / "examples"
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "cpu"
PROFILE = "v100-pcie3"

TOKENS = {
    "@huge": "9" * 400,
    "@digits": "9" * 5000,
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@exponent": "1e400",
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@deeper than messages": '{"a":' * 700 + "1" + "}" * 700,
    "@surrogate": '"\\ud800"',
}
"""What json.dumps does not write, by the text that stands for it."""

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, 1e308, -1e308, 1e-320, 10**15, 10**30, -(10**30)),
    *("", "x", "\x1b[31mred", "\u202eabc", "a" * 10_000, "²", "1e5", "nan", "two\nlines", "\0"),
    *("[red]", "zvc+" * 300 + "zvc", [], {}, [[]], {"": {}}, [None], {"x": None}, [1, 2]),
    *TOKENS,
]
KEYS = ("", " ", "-1", "1_0", "1.5", "²", "01", "\x1b[31m", "a" * 10_000)
WHOLE = (b"", b"null", b"[]", b"{}", b"{" * 100_000, b"\0" * 10, b"\xff\xfe", b"9" * 5000)
ENCODINGS = ("utf-16", "utf-8-sig", "utf-32", "utf-7")


def places(value, at=()):
    yield at
    children: Any = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    for key, child in children:
        yield from places(child, (*at, key))


def with_odd_value(data: bytes, rnd: Random) -> bytes:
    document = json.loads(data)
    for _ in range(rnd.choice((1, 1, 2))):
        *path, key = rnd.choice([at for at in places(document) if at] or [("x",)])
        parent = functools.reduce(lambda whole, part: whole[part], path, document)
        what = rnd.randrange(5)
        if what <= 1:
            parent[key] = copy.deepcopy(rnd.choice(ODD))  # it may be changed next
        elif what == 2:
            parent.pop(key, None) if isinstance(parent, dict) else parent.pop(key)
        elif what == 3 and isinstance(parent, dict):
            parent[rnd.choice((*KEYS, f"{key}x", str(key).upper()))] = parent.pop(key, None)
        elif isinstance(parent, list):
            parent.insert(key, parent[key])
    text = json.dumps(document)
    for name, raw in TOKENS.items():
        text = text.replace(json.dumps(name), raw)
    return text.encode()


def with_a_key_twice(data: bytes, rnd: Random) -> bytes:
    key = rnd.choice(list(json.loads(data)))
    return data.rstrip()[:-1] + f", {json.dumps(key)}: {json.dumps(rnd.choice(ODD))}}}".encode()


def with_other_bytes(data: bytes, rnd: Random) -> bytes:
    changed = bytearray(data)
    start = rnd.randrange(len(changed))
    end = start + rnd.randrange(1, 50)
    what = rnd.randrange(4)
    if what == 0:
        changed[start] ^= 1 << rnd.randrange(8)
    elif what == 1:
        del changed[start:]
    elif what == 2:
        del changed[start:end]
    else:
        changed[start:start] = changed[start:end] + bytes([rnd.randrange(256)])
    return bytes(changed)


def mutated(data: bytes, rnd: Random) -> bytes:
    """What a mutation makes of a file; `Random` may be Hypothesis' own, which shrinks."""
    what = rnd.randrange(20)
    if what < 12:
        return with_odd_value(data, rnd)
    if what < 17:
        return with_other_bytes(data, rnd)
    if what == 17:
        return with_a_key_twice(data, rnd)
    if what == 18:
        return data.decode().encode(rnd.choice(ENCODINGS))
    return rnd.choice(WHOLE)


# What is done with each kind of file. `again` is the same object written and read once more.


@functools.cache
def example_trace() -> Trace:
    return Trace.parse(EXAMPLES / "trace.json")


def read_plan(path):
    plan = Plan.parse(path)
    assert Plan.parse(json.loads(json.dumps(plan.to_dict()))) == plan
    simulate(example_trace(), load_hardware(PROFILE), plan)


def read_trace(path):
    trace = Trace.parse(path)
    assert Trace.parse(json.loads(json.dumps(trace.to_dict()))) == trace
    show_plans(trace, PROFILE, "joint")


def read_hardware(path):
    hardware = load_hardware(path)
    assert load_hardware(json.loads(json.dumps(hardware.to_dict()))) == hardware
    planning.hardware_cells(hardware)
    show_plans(example_trace(), hardware, "vdnn-all")


def show_plans(trace, hardware, policy):
    for row in compare(trace, hardware, None, ["none", policy], time_limit=0.02):
        planning.cells(row)
        json.dumps(planning.record(row), allow_nan=False)


def read_calibration(path):
    put_into_cache(path, calibration.path_of(calibration.machine_of("cpu")))
    calibration._read.cache_clear()
    found = calibration.stored("cpu")
    calibration._read.cache_clear()
    if found is not None:
        shown = [*calibration_report.rows(found), *calibration_report.notes(found)]
        assert "nan" not in str(shown)


KERNEL = Cubin(bytes(range(256)), "zvc_encode", 40, 0, 1024)


def read_kernel(path):
    assert cubins._parsed(path.read_bytes()) in (None, KERNEL)


def put_into_cache(path, target):
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    target.write_bytes(path.read_bytes())
    target.chmod(0o600)


def read_record(path):
    record = explain.load(path)
    rows = list(explain.site_rows(record))
    for site in record["sites"][:1]:
        rows += explain.candidate_rows(record, site["position"])
    assert {type(cell) for row in rows for cell in row} <= {str}
    explain.summary(record)
    json.dumps(record, allow_nan=False)


def read_timeline(path):
    events = timeline.load(path)
    assert {type(cell) for row in timeline.rows(events) for cell in row} <= {str}
    timeline.summary(events)


def read_result(path):
    from cswap.experiments import html_page, results_page

    sections, _ = results_page.sections(path.parent)
    html_page.render("results", sections)


def for_this_machine(name: str) -> Callable[[], bytes]:
    def read() -> bytes:
        record = json.loads((EXAMPLES / name).read_text())
        return json.dumps({**record, "machine": calibration.machine_of("cpu")}).encode()

    return read


FILES: dict[str, tuple[Callable[[], bytes], Callable[[Path], object]]] = {
    "plan": ((EXAMPLES / "plan.json").read_bytes, read_plan),
    "trace": ((EXAMPLES / "trace.json").read_bytes, read_trace),
    "hardware": (
        Path(calibration.__file__).parents[1].joinpath(f"plan/profiles/{PROFILE}.json").read_bytes,
        read_hardware,
    ),
    "calibration": (for_this_machine("calibration.json"), read_calibration),
    "kernel": (lambda: cubins._record(KERNEL), read_kernel),
    "record": ((EXAMPLES / "stats.json").read_bytes, read_record),
    "timeline": ((EXAMPLES / "timeline.json").read_bytes, read_timeline),
    "result": ((RESULTS / "swap.json").read_bytes, read_result),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile") / "file.json"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    # A cache that is ignored says so each time: thousands of lines.
    monkeypatch.setattr(logging.getLogger("cswap"), "disabled", True)


@pytest.mark.parametrize("kind", FILES)
def test_the_examples_are_read(kind, file):
    make, read = FILES[kind]
    file.write_bytes(make())
    read(file)


def fails_cleanly(kind: str, file: Path, rnd: Random) -> None:
    make, read = FILES[kind]
    file.write_bytes(mutated(make(), rnd))
    try:
        read(file)
    except CswapError as error:
        text = str(error)
        assert text.isprintable()
        assert len(text) < 1500
        assert "Traceback" not in text


ONCE = settings(suppress_health_check=list(HealthCheck), deadline=None, print_blob=True)


@pytest.mark.parametrize("kind", FILES)
@ONCE
@given(rnd=st.randoms(use_true_random=False))
def test_a_program_gets_the_object_or_an_error_of_ours(kind, file, rnd):
    fails_cleanly(kind, file, rnd)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_a_program_gets_the_object_or_an_error_of_ours_every_time(kind, file):
    for seed in range(150 if kind == "result" else 1000):  # results have many tables
        fails_cleanly(kind, file, Random(f"{kind} {seed}"))


# The same through the command line: one line on stderr and exit code 2, or a table.

COMMANDS = {
    "explain": ("record", ("explain", "FILE")),
    "explain a position": ("record", ("explain", "FILE", "--position", "1")),
    "explain as JSON": ("record", ("explain", "FILE", "--json")),
    "report": ("timeline", ("report", "FILE")),
    "plan": ("trace", ("plan", "FILE", "--hardware", PROFILE, "--policy", "none")),
    "plan for": (
        "hardware",
        ("plan", str(EXAMPLES / "trace.json"), "--hardware", "FILE", "--policy", "none"),
    ),
    "hardware show": ("hardware", ("hardware", "show", "FILE")),
    "calibrate": ("calibration", ("calibrate", "--show")),
}


def command_line(*words: str) -> tuple[object, str, str]:
    cli = pytest.importorskip("cswap.cli")
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, list(sys.path)
    sys.argv, code = ["cswap", *words], 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as leaving:
        code = leaving.code  # type: ignore[assignment]
    finally:
        sys.argv, sys.path[:] = before
    return code, out.getvalue(), err.getvalue()


def ends_in_a_line(command: str, file: Path, rnd: Random) -> None:
    kind, words = COMMANDS[command]
    file.write_bytes(mutated(FILES[kind][0](), rnd))
    if kind == "calibration":
        put_into_cache(file, calibration.path_of(calibration.machine_of("cpu")))
        calibration._read.cache_clear()
    code, out, err = command_line(*(str(file) if word == "FILE" else word for word in words))
    assert code in ((0, 1) if kind == "calibration" else (0, 2))
    assert (out + err).replace("\n", "").isprintable()
    assert (err.count("\n"), bool(err)) == ((1, True) if code == 2 else (0, False))


@pytest.mark.parametrize("command", COMMANDS)
@settings(ONCE, max_examples=8)
@given(rnd=st.randoms(use_true_random=False))
def test_a_user_gets_a_table_or_one_line(command, file, rnd):
    ends_in_a_line(command, file, rnd)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_user_gets_a_table_or_one_line_every_time(command, file):
    for seed in range(100):
        ends_in_a_line(command, file, Random(f"{command} {seed}"))


@pytest.fixture(autouse=True, scope="module")
def no_cache_left(tmp_path_factory) -> Any:
    folder = tempfile.mkdtemp(dir=tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSWAP_CACHE_DIR", folder)
        calibration._read.cache_clear()
        yield
    calibration._read.cache_clear()
