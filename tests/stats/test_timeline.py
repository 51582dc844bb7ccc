"""`SwapEngine.trace` and `cswap report`."""

from __future__ import annotations

import json
import time

import pytest
import torch

import cswap
from cswap.engine.engine import SwapEngine
from cswap.errors import ConfigError
from cswap.report import timeline as report
from cswap.stats.step_trace import TRACKS, SavedTensor, Timeline
from tests.devices.sim import SimDevice

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from cswap import cli


@pytest.fixture
def recorded(tmp_path):
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    path = tmp_path / "step.json"
    with cswap.install(model, min_bytes=0, codec="zvc") as handle:

        def step():
            loss = model(torch.randn(512, 256)).square().sum()
            loss.backward()

        step()
        swapped = handle.stats.swapped
        with handle.engine.trace(path):
            step()
        after = handle.stats.swapped
        step()  # not recorded
    return path, after - swapped


def spans(path, name):
    events = json.loads(path.read_text())["traceEvents"]
    return [e for e in events if e["ph"] == "X" and e["name"] == name]


def test_a_file_is_a_chrome_trace(tmp_path):
    timeline, tensor = Timeline(), SavedTensor(3, 1, "layers.0")
    timeline.job("encode", "codec", tensor, (1.25, 1.75), "zvc", 100)
    timeline.span("wait", tensor, 2.0, 2.5)
    timeline.count(1.0, device=5, host=6)
    timeline.save(tmp_path / "step.json")
    about = '"position": 3, "step": 1, "saved in": "layers.0"'
    lanes = (
        f'{{"ph": "M", "name": "thread_name", "pid": 1, "tid": {i}, "args": {{"name": "{name}"}}}}'
        for i, name in enumerate(TRACKS, 1)
    )
    events = (
        '{"ph": "C", "name": "bytes", "ts": 0.0, "pid": 1, "args": {"device": 5, "host": 6}}',
        (
            '{"ph": "X", "name": "encode", "ts": 250000.0, "dur": 500000.0, "pid": 1, "tid": 2, '
            f'"args": {{"codec": "zvc", "bytes": 100, {about}}}}}'
        ),
        (
            '{"ph": "X", "name": "wait", "ts": 1000000.0, "dur": 500000.0, "pid": 1, "tid": 1, '
            f'"args": {{{about}}}}}'
        ),
    )
    assert (tmp_path / "step.json").read_text("utf-8") == (
        f'{{"traceEvents": [{", ".join((*lanes, *events))}], "displayTimeUnit": "ms", '
        '"otherData": {"format": "cswap-timeline", "version": 1}}\n'
    )


def test_every_encode_and_decode_of_the_step_is_there(recorded):
    path, swapped = recorded
    assert len(spans(path, "encode")) == swapped
    assert len(spans(path, "decode")) == swapped
    for event in spans(path, "encode") + spans(path, "decode"):
        assert event["dur"] > 0
        assert event["ts"] >= 0
        assert event["tid"] - 1 in range(len(TRACKS))
        assert event["args"]["codec"] == "zvc"
        assert event["args"]["saved in"]
    steps = {event["args"]["step"] for event in spans(path, "encode")}
    assert len(steps) == 1


def test_a_tensor_is_decoded_after_it_was_encoded(recorded):
    path, _ = recorded
    ends = {e["args"]["position"]: e["ts"] + e["dur"] for e in spans(path, "encode")}
    for event in spans(path, "decode"):
        assert event["ts"] >= ends[event["args"]["position"]]


def test_the_bytes_held_come_back_to_nothing(recorded):
    path, _ = recorded
    counts = [e["args"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "C"]
    assert max(c["host"] for c in counts) > 0
    assert max(c["device"] for c in counts) >= 512 * 256 * 4


def test_the_table_has_every_tensor(recorded):
    path, swapped = recorded
    result = CliRunner().invoke(cli.app, ["report", str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Recorded: " in result.output
    totals = report.by_module(report.load(path))
    assert sum(t.tensors for t in totals.values()) == swapped


def test_wrong_files_are_refused(tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"traceEvents": []}')
    with pytest.raises(ConfigError, match="not written by"):
        report.load(other)
    Timeline().save(other)
    with pytest.raises(ConfigError, match="nothing was swapped"):
        report.load(other)
    with pytest.raises(ConfigError, match="cannot be read"):
        report.load(tmp_path / "none.json")


def test_busy_time_counts_what_overlaps_once():
    def span(start, end, tid):
        about = {"saved in": "", "bytes": 1, "codec": "zvc"}
        return {
            "ph": "X",
            "name": "encode",
            "ts": start,
            "dur": end - start,
            "tid": tid,
            "args": about,
        }

    events = [span(0, 1000, 2), span(500, 2000, 2), span(3000, 4000, 2)]
    found = report.summary(report.Recording(events))
    assert found.startswith(
        "From the first to the last swap event: 4.0 ms; codec busy 3.0 ms (75%)"
    )
    found = report.summary(report.Recording(events, block_us=6000))
    assert found.startswith("Recorded: 6.0 ms; codec busy 3.0 ms (50%)")


def test_the_time_of_the_recorded_block_is_known(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU())
    with cswap.install(model, min_bytes=0, codec="zvc") as handle:
        begin_s = time.perf_counter()
        with handle.engine.trace(tmp_path / "step.json"):
            time.sleep(0.1)
            model(torch.randn(512, 256)).sum().backward()
            time.sleep(0.1)
        took_us = 1e6 * (time.perf_counter() - begin_s)
    block_us = report.load(tmp_path / "step.json").block_us
    assert block_us is not None
    assert 2e5 < block_us < took_us
    command = ["report", str(tmp_path / "step.json"), "--format", "json"]
    data = json.loads(CliRunner().invoke(cli.app, command).output)
    assert data["recorded_s"] == pytest.approx(block_us / 1e6)
    assert 0 < data["swapping_s"] < data["recorded_s"] - 0.2


def test_over_a_link_copies_are_there_too():
    engine = SwapEngine(cswap.SwapConfig(codec="zvc", min_bytes=0), device=SimDevice(0))
    with engine.trace() as timeline:
        packed = engine.pack(torch.randn(1 << 12))
        engine.synchronize()
        engine.unpack(packed)
    spans = [e for e in timeline.to_chrome()["traceEvents"] if e["ph"] == "X"]
    names = [e["name"] for e in spans]
    assert sorted(names) == ["copy in", "copy out", "decode", "encode"]
    assert {e["args"]["codec"] for e in spans} == {"zvc"}
