"""`python -m bench swap`: every way is compared, and what cannot run says why."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from typer.testing import CliRunner

from bench.__main__ import app
from bench.swap import command, report
from bench.swap.measure import MEMCPY
from bench.swap.stack import MIB, stack_task
from bench.workloads import methods
from bench.workloads.methods import METHODS, ON_CPU, UNLIMITED
from bench.workloads.saved_bytes import Held, SavedBytes
from cswap.advisor.rates import PRICES_S_PER_BYTE

PEERS = ("TRL OffloadActivations", "torchtune OffloadActivations")
LOSSLESS = [name for name in ON_CPU if name not in (*PEERS, "cswap int8")]


def run(out, *arguments):
    options = ["--quick", "--steps", "5", "--mib", "1", "--out", str(out)]
    return CliRunner().invoke(app, ["swap", *options, *arguments], env={"COLUMNS": "250"})


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("swap") / "swap.json"
    # Small batches: everything that cswap would leave alone as too small is swapped, too.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSWAP_MIN_BYTES", "1KiB")
        patch.setitem(PRICES_S_PER_BYTE, "cpu", 1e-7)
        # Two would wait for one another in busy loops where the machine has other work.
        patch.setattr(command, "N_THREADS", 1)
        result = run(out, "--models", "stack")
    assert result.exit_code == 0, result.output
    return out, result.output, json.loads(out.read_text())


def rows_of(document):
    return {row["method"]: row for row in document["rows"]}


@pytest.mark.slow
def test_every_way_has_a_row_and_what_cannot_run_says_why(found):
    _, output, document = found
    assert (document["kind"], document["version"], document["complete"]) == ("swap", 1, True)
    rows = rows_of(document)
    assert list(rows) == [*ON_CPU, MEMCPY]
    for name, row in rows.items():
        assert (row["failure"] is None) == (row["step"] is not None)
        assert name in PEERS or row["failure"] is None, row["failure"]
        if row["failure"]:
            assert row["failure"].split()[0] in output
            assert "not installed" in row["failure"] or "cannot" in row["failure"]
        else:
            step = row["step"]
            assert 0 < step["low_s"] <= step["median_s"] <= step["high_s"]
            low, high = row["time_of_off_spread"]
            assert low <= row["time_of_off"] <= high
    assert rows["off"]["time_of_off"] == 1.0
    assert rows[MEMCPY]["time_of_off"] < 1.0


@pytest.mark.slow
def test_gradients_have_the_bits_of_off_unless_lossy(found):
    rows = rows_of(found[2])
    assert [rows[name]["bit_equal"] for name in LOSSLESS] == [True] * len(LOSSLESS)
    assert rows["cswap int8"]["bit_equal"] is False
    assert rows["cswap int8"]["max_grad_diff"] > 0


@pytest.mark.slow
def test_bytes_are_those_of_the_stack(found):
    rows = rows_of(found[2])
    off, moved = rows["off"]["peak_saved_bytes"], rows["off"]["moved_bytes"]
    assert MIB <= moved < 1.2 * MIB  # and the batch, the logits, the loss
    assert off > 0.9 * MIB  # without the batch
    # Blocks of two layers: a checkpoint keeps one tensor of two.
    assert 0.4 * off < rows["checkpoint"]["held_bytes"] < 0.7 * off
    assert rows["save_on_cpu"]["peak_saved_bytes"] > off  # its copies, of parameters too
    limited, unlimited = (rows[name]["held_bytes"] for name in ("cswap lossless", UNLIMITED.name))
    assert unlimited <= limited
    assert rows["cswap int8"]["ratio"] > 3
    assert [row["fallbacks"] for row in rows.values()] == [0] * len(rows)
    assert rows[MEMCPY]["moved_bytes"] == moved


@pytest.mark.slow
def test_the_picture_and_the_table_are_there(found):
    out, output, document = found
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert not out.with_suffix(".partial.json").exists()
    cells = report.cells(document)
    assert {len(row) for row in cells} == {len(report.HEADINGS)}
    assert "checkpoint + save_on_cpu" in output


def test_an_interrupted_run_is_gone_on_with(tmp_path, monkeypatch):
    out, trained = tmp_path / "swap.json", []

    def train(task, methods, on_step):
        trained.append(task.name)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return [{"model": task.name, "method": method} for method in methods]

    monkeypatch.setattr(command, "N_THREADS", 1)
    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(report, "table", lambda _document: "")
    monkeypatch.setattr(report, "draw", lambda *_: None)
    options = ("--models", "cnn,stack", "--methods", "checkpoint")
    assert run(out, *options).exit_code == 130
    assert not out.exists()
    again = run(out, *options)
    assert again.exit_code == 0, again.output
    assert "cnn done before" in again.output
    assert trained == ["cnn", "stack 1 MiB", "stack 1 MiB"]
    rows = json.loads(out.read_text())["rows"]
    assert [(r["model"], r["method"]) for r in rows] == [
        (model, method) for model in ("cnn", "stack 1 MiB") for method in ("off", "checkpoint")
    ]
    trained.clear()
    trained.append("none")
    assert run(out, *options, "--steps", "4").exit_code == 130  # other settings: begun anew
    assert trained == ["none", "cnn"]


@pytest.mark.parametrize(
    ("option", "value"), [("--models", "no"), ("--methods", "no"), ("--mib", "x"), ("--mib", "0")]
)
def test_wrong_options_are_refused(option, value, tmp_path):
    result = run(tmp_path / "swap.json", option, value)
    assert result.exit_code == 2
    assert option in result.output
    assert not list(tmp_path.iterdir())


def test_copies_that_hooks_below_make_are_counted():
    x = torch.randn(1024, requires_grad=True)
    y = x * 1  # saved, and not the leaf
    saved = SavedBytes([x], [], Held)
    with save_on_cpu(pin_memory=True), saved.watch():
        z = y.exp()  # saves its result
        saved.sample()
    assert saved.curve.nbytes[-1] == 2 * z.nbytes
    assert saved.raw_bytes == z.nbytes
    del z
    saved.sample()
    assert saved.curve.nbytes[-1] == 0


def test_a_stack_saves_as_many_bytes_as_asked():
    task = stack_task(4, n_steps=1)
    model = task.build()
    saved = SavedBytes(model.parameters(), task.batch(0, 0), Held)
    with saved.watch():
        out = model(task.batch(0, 0)[0])
    blocks = out.nbytes + 4 * MIB
    assert saved.raw_bytes == pytest.approx(blocks, rel=0.1)


class Offload(nullcontext[None]):
    """What a peer's context looks like, without doing anything."""

    def __init__(self, **options):
        super().__init__()
        self.pack_hook = self.unpack_hook = lambda x: x


def test_peers_are_used_where_they_are_installed(monkeypatch):
    import sys
    from types import ModuleType

    for name, parts in (
        ("trl.models.activation_offloading", ("trl", "trl.models")),
        ("torchtune.training", ("torchtune",)),
    ):
        for part in parts:
            monkeypatch.setitem(sys.modules, part, ModuleType(part))
        module = ModuleType(name)
        module.OffloadActivations = Offload  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    for method in METHODS:
        if method.name in PEERS:
            assert isinstance(method.around(False), Offload)


def test_a_peer_says_whether_it_or_something_of_its_own_is_missing():
    error = ModuleNotFoundError("No module named 'trl'", name="trl")
    assert methods.why_missing("trl", error) == "trl is not installed"
    error = ModuleNotFoundError("No module named 'accelerate'", name="accelerate")
    said = methods.why_missing("trl", error)
    assert said == "trl cannot be imported (No module named 'accelerate')"


def test_methods_change_a_model_as_they_say():
    assert [m.name for m in METHODS if m.checkpointed] == ["checkpoint", "checkpoint + save_on_cpu"]
    assert set(methods.DEMO) == {"off", "lossless", "remat", "int8", "checkpoint"}
    model = stack_task(1, n_steps=1).build()
    for method in ON_CPU.values():
        handle = method.switch_on(model, pins=False)
        assert (handle is not None) == method.name.startswith("cswap")
        assert model.checkpointed is method.checkpointed
        if handle is not None:
            handle.remove()
    assert isinstance(model, nn.Module)
