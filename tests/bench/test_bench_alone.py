"""`python -m bench alone`: every way has a process, which is measured by the system's counts."""

import json
import signal
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")

import torch
from typer.testing import CliRunner

from bench.__main__ import app
from bench.alone import measure, memory, report, trainer
from bench.alone.trainer import CHECKPOINT, CSWAP, INT8, LEFT_ALONE, OFF, WAYS, Order, Trainer

MIB = 1 << 20


@pytest.mark.slow
def test_every_way_is_trained_in_a_process_of_its_own(tmp_path, monkeypatch):
    # Where pytest is started as a program, new processes do not find `bench`.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    out = tmp_path / "alone.json"
    options = ["alone", "--quick", "--models", "gpt", "--steps", "4", "--out", str(out)]
    result = CliRunner().invoke(app, options, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert (document["kind"], document["version"], document["complete"]) == ("alone", 1, True)
    rows = {row["way"]: row for row in document["rows"]}
    assert list(rows) == list(WAYS)
    assert rows[OFF]["time_of_off"] == 1
    for way, row in rows.items():
        assert row["same_losses"] or way == INT8
        assert 0 < row["step"]["low_s"] <= row["step"]["median_s"] <= row["step"]["high_s"]
        assert way in result.output
    assert {len(line) for line in report.cells(document)} == {len(report.HEADINGS)}


@pytest.mark.parametrize("way", [OFF, CHECKPOINT, CSWAP])
def test_a_trainer_trains_as_off_does(way):
    threads = torch.get_num_threads()
    losses = {}
    for name in (OFF, way):
        one = Trainer(Order("cnn", name, quick=True, threads=threads))
        steps = [one.step(number) for number in range(3)]
        losses[name] = [step.loss for step in steps]
        assert all(step.seconds > 0 for step in steps)
    assert losses[way] == losses[OFF]
    assert len(set(losses[way])) == 3


def test_a_process_that_ends_before_its_time_is_named(monkeypatch):
    class Process:
        def __init__(self, **_):
            pass

        start = kill = __init__

    class Context:
        Pipe = staticmethod(Pipe)

        def Process(self, target, args, daemon):  # noqa: N802 - as multiprocessing has it
            return Process()

    monkeypatch.setattr("multiprocessing.get_context", lambda _: Context())
    with pytest.raises(measure.EndedError, match=r"^cnn, .*: the process has ended"):
        measure.measure("cnn", rounds=2, settling=0, quick=True, threads=1, on_step=print)


def test_ctrl_c_ends_the_process_that_asks_and_no_trainer_complains(monkeypatch):
    class Pipe:
        def recv(self):
            return None

        def send(self, growth):
            assert growth is None or growth > -MIB

    monkeypatch.setattr(trainer, "_load", lambda: None)
    threads, before = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    try:
        trainer.serve(Pipe(), Order("cnn", OFF, quick=True, threads=threads))  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def known(count):
    assert count is not None
    return count


@pytest.mark.skipif(memory.own_bytes() is None, reason="/proc says it")
def test_the_system_counts_what_a_process_takes():
    before, pages = known(memory.own_bytes()), known(memory.fresh_pages())

    def hold():
        held = bytearray(b"1") * (64 * MIB)
        time.sleep(0.02)
        del held

    peak = memory.peak_own_bytes(hold)
    assert known(peak) - before > 48 * MIB
    assert known(memory.fresh_pages()) - pages > 1000
    assert known(memory.own_bytes()) - before < 32 * MIB


def test_a_system_without_these_counts_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "STATM", tmp_path / "none")
    assert memory.own_bytes() is None
    assert Trainer(Order("cnn", LEFT_ALONE, quick=True, threads=1)).growth() is None
    times = {"step": {"median_s": 1.0}, "time_of_off": 1.0, "time_of_off_spread": [1.0, 1.0]}
    row = {"model": "cnn", "way": OFF, **times, "pages": None, "growth_bytes": None}
    line = report.cells({"rows": [{**row, "same_losses": True}]})[0]
    assert line[4:6] == ["-", "-"]
