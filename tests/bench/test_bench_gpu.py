"""The GPU benchmarks, as far as a machine without one can tell: everything but the figures.

The parts run here on a stand-in that measures the CPU, with tiny plans.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import cswap
from bench.__main__ import app
from cswap.codecs.registry import get_codec

ROOT = Path(__file__).parents[2]

with pytest.MonkeyPatch.context() as patch:  # the root is not on the path that pytest starts with
    patch.syspath_prepend(str(ROOT))
    from bench.gpu import (
        codecs,
        contenders,
        link,
        samples,
        swap,
        tables,
        trace,
        training,
    )
    from bench.gpu.meter import CudaMeter, Memory, Meter, rss_bytes
    from bench.gpu.report import Report, driver_version
    from bench.workloads import large_models as models
    from bench.workloads.host_memory import host_available_bytes
    from bench.workloads.methods import METHODS, ORACLE, Method
    from cswap.experiments.timing import timing_of

KIB = 1 << 10
GPU = {"name": "made up"}


class HostMeter(Meter):
    """Measures the CPU by the clock, so that all but `CudaMeter` can run here."""

    device = torch.device("cpu")
    stream = None
    pins = False

    def time_s(self, run, *, within_s):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return timing_of(seconds)

    def flush(self):
        pass

    def synchronize(self):
        pass

    def beside(self, *runs):
        for run in runs:
            run()

    def isolate(self):
        pass

    def memory(self):
        return Memory(allocated=1 << 30, reserved=2 << 30, pinned=None)


def report_of(tmp_path, part):
    return Report(tmp_path, part, HostMeter(), GPU)


def finished(report):
    before = report.document
    report.finish()
    document = json.loads(report.path.read_text(encoding="utf-8"))
    assert document == json.loads(json.dumps(report.document))
    assert document["complete"]
    assert not before["complete"]
    return document


# ------------------------------------------------------------------- command


def command(*arguments):
    return CliRunner().invoke(app, ["gpu", *arguments], env={"COLUMNS": "200"})


def test_without_a_device_it_says_so_and_exits_with_2(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "results"
    done = command("codecs", "--out", str(out))
    assert done.exit_code == 2
    assert done.stdout.startswith("no CUDA device")
    assert not out.exists()  # before anything else


def test_a_part_that_does_not_exist_is_refused_by_name():
    done = command("nonsense")
    assert done.exit_code == 2
    assert all(part in done.output for part in ("nonsense", *tables._TABLES))


# ---------------------------------------------------------------- arithmetic


def test_bound_takes_the_slower_of_link_and_codec_per_direction():
    # 85 % zeros: ratio 5.5; out limited by the link, back by the codec
    assert swap.bound_s((5.5, 11.0), (0.5, 3.0), 5.5) == 1.0 + 3.0
    assert swap.bound_s((1.0, 1.0), (0.0, 0.0), 1.0) == 2.0


def test_less_percent_is_the_papers_reduction():
    assert swap.less_percent(0.491, 1.0) == pytest.approx(50.9)
    assert swap.less_percent(2.0, 1.0) == -100.0


def test_driver_version_is_read_from_what_the_driver_says(tmp_path):
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    assert driver_version(file) == "580.159.03"


def test_host_memory_is_known_here():
    available = host_available_bytes()
    assert available is not None
    assert available > 1 << 20
    assert rss_bytes() > 1 << 20


# ------------------------------------------------------------------- samples


@pytest.mark.parametrize("sample", samples.ALL, ids=str)
def test_samples_have_their_size_dtype_and_values(sample):
    x = sample.make(256 * KIB, torch.device("cpu"))
    assert (x.dtype, x.nbytes) == (sample.dtype, 256 * KIB)
    assert torch.equal(x, sample.make(256 * KIB, torch.device("cpu")))
    zeros = float((x == 0).double().mean())
    if sample.kind.startswith("relu"):
        assert zeros == pytest.approx(int(sample.kind[-2:]) / 100, abs=0.02)
    elif sample.kind == "mask":
        assert zeros == pytest.approx(1 - samples.KEPT, abs=0.01)
    else:
        assert zeros < 0.01


# -------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("build", "published"),
    [
        pytest.param(models.vgg16, 138_357_544, id="VGG-16"),
        pytest.param(models.resnet50, 25_557_032, id="ResNet-50"),
        pytest.param(lambda: models.gpt2(*models.GPT2_SMALL), 124_439_808, id="GPT-2 small"),
        pytest.param(lambda: models.gpt2(*models.GPT2_MEDIUM), 354_823_168, id="GPT-2 medium"),
        pytest.param(lambda: models.gpt2(*models.GPT2_LARGE), 774_030_080, id="GPT-2 large"),
    ],
)
def test_models_have_the_published_number_of_parameters(build, published):
    with torch.device("meta"):
        assert models.count_parameters(build()) == published


@pytest.mark.parametrize(
    ("build", "n_blocks"),
    [
        pytest.param(models.vgg16, 5, id="VGG-16"),
        pytest.param(models.resnet50, 16, id="ResNet-50", marks=pytest.mark.slow),
        pytest.param(
            lambda: models.gpt2(*models.GPT2_SMALL), 12, id="GPT-2 small", marks=pytest.mark.slow
        ),
    ],
)
def test_checkpointed_models_run_each_block_once(build, n_blocks, monkeypatch):
    run = []

    def checkpoint(block, x, use_reentrant):
        assert not use_reentrant
        run.append(block)
        return block(x)

    monkeypatch.setattr(models, "checkpoint", checkpoint)
    with torch.device("meta"):
        model = build()
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        x = tokens if n_blocks == 12 else torch.zeros(1, 3, 224, 224)
        plain = model(x).shape
        assert run == []
        model.checkpointed = True
        assert model(x).shape == plain
    assert len(run) == len(set(run)) == n_blocks


def test_the_largest_model_has_1_3e9_parameters():
    with torch.device("meta"):
        assert models.count_parameters(models.gpt2(*models.GPT_1_3B)) == pytest.approx(
            1.3e9, rel=0.02
        )


# GPT-2 medium and large are the code of GPT-2 small, and take seconds.
LARGE = ("GPT-2 medium", "GPT-2 large")


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(t, id=t.name, marks=pytest.mark.slow if t.name in LARGE else ())
        for t in training.Plan().tasks
    ],
)
def test_models_give_logits_for_every_target(task):
    small = replace(task, batch=2)
    inputs, targets = small.inputs(torch.device("cpu"))
    with torch.device("meta"):
        logits = task.build()(inputs.to("meta"))
    assert logits.shape == (2, task.n_classes, *targets.shape[1:])


# --------------------------------------------------------------------- parts


def test_codecs_are_measured_one_by_one(tmp_path):
    report = report_of(tmp_path, "codecs")
    plan = codecs.Plan((samples.RELU_85,), 64 * KIB, (8 * KIB, 64 * KIB), 0.0)
    codecs.run(HostMeter(), report, plan)
    document = finished(report)
    assert {s["what"] for s in document["skipped"]} <= {"nvCOMP"}
    rows = document["rows"]
    first = {r["codec"]: r for r in rows if r["data"] == "relu-85" and r["nbytes"] == 64 * KIB}
    assert set(first) >= {"copy", "raw", "zvc", "csr", "expk", "int8", "fp8", "int4"}
    assert first["zvc"]["ratio"] == pytest.approx(32 / (1 + 0.15 * 32), rel=0.05)
    assert first["copy"]["encode_of_copy"] == 1.0
    assert first["zvc"]["relative_rms_error"] == 0
    assert 0 < first["int8"]["relative_rms_error"] < 0.05
    sizes = [r["nbytes"] for r in rows if r["codec"] == "int8" and r["data"] == "normal"]
    assert sizes == [8 * KIB, 64 * KIB]


def test_a_codec_that_fails_costs_nobody_elses_figures(tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise RuntimeError("no such luck\nadvice on debugging")

    monkeypatch.setattr(get_codec("zvc"), "encode_flat", fail)
    report = report_of(tmp_path, "codecs")
    codecs.run(HostMeter(), report, codecs.Plan((samples.RELU_85,), 8 * KIB, (), 0.0))
    document = finished(report)
    names = {r["codec"] for r in document["rows"]}
    assert "csr" in names
    assert "zvc" not in names
    failed = [s["why"] for s in document["skipped"] if s["what"].startswith("zvc on")]
    assert failed == ["RuntimeError: no such luck"]


def test_figures_of_a_codec_that_changes_bits_are_refused():
    x = torch.ones(8)
    with pytest.raises(ValueError, match="changed bits"):
        contenders.relative_error(x, x + 1, lossless=True)
    with pytest.raises(ValueError, match="relative error"):
        contenders.relative_error(x, x * float("nan"), lossless=False)


def test_link_is_measured_over_sizes(tmp_path):
    report = report_of(tmp_path, "link")
    plan = link.Plan((KIB, 64 * KIB), 0.0)
    link.run(HostMeter(), report, plan)
    document = finished(report)
    assert [(r["way"], r["nbytes"]) for r in document["rows"]] == [
        (way, nbytes) for nbytes in plan.sizes for way in link.WAYS
    ]
    for row in document["rows"]:
        moved = row["nbytes"] * (2 if row["way"] == "both" else 1)
        assert row["gb_per_s"] == pytest.approx(moved / row["timing"]["median_s"] / 1e9)


def test_swaps_are_compared_with_copies_and_with_their_bound(tmp_path):
    report = report_of(tmp_path, "swap")
    swap.run(HostMeter(), report, swap.Plan((64 * KIB,), 2))
    document = finished(report)
    rows = {(r["data"], r["dtype"], r["way"]): r for r in document["rows"]}
    for data, dtype, way in (("relu-85", "float32", "zvc"), ("normal", "bfloat16", "fp8")):
        row, copy = rows[data, dtype, f"cswap {way}"], rows[data, dtype, swap.COPY]
        assert row["ratio"] > 1.5
        assert row["fallbacks"] == 0
        assert row["total_s"] == pytest.approx(row["out"]["median_s"] + row["back"]["median_s"])
        assert row["less_than_copy"] == swap.less_percent(row["total_s"], copy["total_s"])
        assert row["of_bound"] == row["total_s"] / row["bound_s"]
        assert copy["less_than_copy"] == 0
        assert copy["of_bound"] is None


class TinyModel(models.BlockModel):
    """As the real ones are built, small enough for a test."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(x)


TINY = training.Task("tiny", TinyModel, 128, (256,), 10)


def test_every_method_trains_to_the_same_loss_and_says_what_it_took(tmp_path, monkeypatch):
    monkeypatch.setenv("CSWAP_MIN_BYTES", "1KiB")
    monkeypatch.setattr(training, "N_WARM_FIT", training.N_WARM)
    monkeypatch.setattr("cswap.fit.goal.usable_bytes", lambda _device: 1 << 30)
    report = report_of(tmp_path, "training")
    training.run(HostMeter(), report, training.Plan((TINY,), training.ALL, 2))
    document = finished(report)
    rows = {r["method"]: r for r in document["rows"]}
    assert list(rows) == [m.name for m in training.ALL]
    for peer in ("TRL", "torchtune"):
        failure = rows.pop(f"{peer} OffloadActivations")["failure"]
        assert failure is None or "not installed" in failure or "cannot be" in failure
    assert [r["failure"] for r in rows.values()] == [None] * len(rows)
    loss = rows[ORACLE]["loss"]
    for name, row in rows.items():
        lossy = name.endswith(("fp8", "int8", "int4"))
        assert row["loss"] == (pytest.approx(loss, rel=0.2) if lossy else loss)
        assert row["n_parameters"] == 3 * 256 * 257 + 10 * 257
        assert row["time_of_oracle"] == row["step_ms"] / rows[ORACLE]["step_ms"]
        assert row["host_rss_bytes"] >= row["host_rss_growth_bytes"]
        assert (row["cswap"] is not None) == name.startswith("cswap")
    assert rows["cswap int8"]["cswap"]["by_codec"]["int8"]["count"] > 0


def test_a_trace_has_the_operators_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setenv("CSWAP_MIN_BYTES", "1KiB")
    report = report_of(tmp_path, "trace")
    methods = METHODS[0], Method("cswap raw", options={"codec": "raw"})
    trace.run(HostMeter(), report, TINY, methods)
    document = finished(report)
    for method in methods:
        rows = [r for r in document["rows"] if r["method"] == method.name]
        whole, *others = rows
        assert (whole["name"], whole["count"], whole["device_us"]) == (trace.WHOLE, 1, 0.0)
        counts = {r["name"]: r["count"] for r in others}
        assert counts["aten::addmm"] == 4  # the products of one step, and of no other
        assert 0 < sum(r["host_us"] for r in others) < 2 * whole["host_us"]
    assert "| tiny | cswap raw | aten::addmm | 4 |" in tables.markdown(document)


def test_without_options_a_gpu_needs_time_to_settle():
    assert training.n_warm(METHODS[0]) == training.N_WARM
    assert training.n_warm(Method("raw", options={"codec": "raw"})) == training.N_WARM
    assert training.n_warm(Method("lossless", options={})) == training.N_WARM_FIT
    assert training.n_warm(training.FIT) == training.N_WARM_FIT


def test_a_goal_is_the_peak_of_checkpointing(tmp_path, monkeypatch):
    class Peaks(HostMeter):
        def memory(self):
            return replace(super().memory(), allocated=1 << 30)

    asked = []
    monkeypatch.setenv("CSWAP_MIN_BYTES", "1KiB")
    monkeypatch.setattr(training, "N_WARM_FIT", training.N_WARM)
    install = cswap.install

    def noted(model, **options):
        asked.append(options)
        return install(model, **options)

    monkeypatch.setattr(cswap, "install", noted)
    report = report_of(tmp_path, "training")
    methods = (METHODS[0], METHODS[1], training.FIT)
    training.run(Peaks(), report, training.Plan((TINY,), methods, 1))
    rows = {r["method"]: r for r in finished(report)["rows"]}
    assert asked == [{"fit": 1 << 30}]
    assert rows["cswap fit"]["failure"] is None
    assert rows["cswap fit"]["loss"] == rows[ORACLE]["loss"] != 0


def test_checkpoints_save_only_the_inputs_of_blocks():
    counts = {}
    for method in METHODS[:3]:
        saved: list[torch.Tensor] = []

        def pack(x, saved=saved):
            saved.append(x)
            return x

        model = TinyModel()
        method.switch_on(model, pins=False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.randn(4, 256, requires_grad=True))
        counts[method.name] = len(saved)
    assert counts["checkpoint"] < counts[ORACLE]
    # what three blocks keep of their inputs goes through save_on_cpu's hooks instead
    assert counts["checkpoint + save_on_cpu"] == counts["checkpoint"] - 3


def test_a_method_that_fails_becomes_a_row_and_the_rest_goes_on(tmp_path):
    class OutOfMemory(models.BlockModel):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 10)

        def forward(self, x):
            if self.checkpointed:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")
            return self.layer(x)

    report = report_of(tmp_path, "training")
    task = replace(TINY, build=OutOfMemory)
    training.run(HostMeter(), report, training.Plan((task,), METHODS[:4], 1))
    rows = {r["method"]: r for r in finished(report)["rows"]}
    assert "out of memory" in rows["checkpoint"]["failure"]
    assert rows["checkpoint"]["step_ms"] is None
    assert rows["save_on_cpu"]["failure"] is None


def test_a_batch_that_does_not_fit_is_halved(tmp_path, capsys):
    class TooLarge(TinyModel):
        def forward(self, x):
            if x.shape[0] > 32:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(x)

    report = report_of(tmp_path, "training")
    training.run(
        HostMeter(), report, training.Plan((replace(TINY, build=TooLarge),), METHODS[:1], 1)
    )
    document = finished(report)
    assert [r["batch"] for r in document["rows"]] == [32]
    shown = capsys.readouterr().out
    assert [n for n in (128, 64, 32) if f"tiny with a batch of {n}" in shown] == [128, 64]


def test_another_failure_does_not_become_the_batch_of_later_runs(tmp_path):
    class Broken(TinyModel):
        def forward(self, x):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    plan = training.Plan((replace(TINY, build=Broken),), METHODS[:2], 1)
    training.run(HostMeter(), report_of(tmp_path, "training"), plan)
    skipped = report_of(tmp_path, "training").document["skipped"]
    assert ["illegal memory access" in s["why"] for s in skipped] == [True, True]
    plan = training.Plan((TINY,), METHODS[:3], 1)
    report = report_of(tmp_path, "training")
    training.run(HostMeter(), report, plan)
    assert [(r["method"], r["batch"]) for r in report.document["rows"]] == [
        (METHODS[2].name, TINY.batch)
    ]


# --------------------------------------------------------------- tables


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Result files with figures made up, but for their form."""
    folder, meter = tmp_path_factory.mktemp("results"), HostMeter()
    report = report_of(folder, "codecs")
    plan = codecs.Plan((samples.RELU_85,), 8 * KIB, (8 * KIB, 16 * KIB), 0.0)
    codecs.run(meter, report, plan)
    report.refuse("lz4", "made up")
    report.finish()
    report = report_of(folder, "link")
    link.run(meter, report, link.Plan((KIB, 2 * KIB), 0.0))
    report.finish()
    report = report_of(folder, "swap")
    swap.run(meter, report, swap.Plan((8 * KIB, 16 * KIB), 1))
    report.finish()
    report = report_of(folder, "training")
    training.run(meter, report, training.Plan((TINY,), METHODS[:2], 1))
    failed = training.Row("tiny", "made up", 4, 1, failure="OutOfMemoryError: made up")
    report.measure("made up", lambda: [failed], str)
    report.finish()
    return {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in folder.glob("*.json")}


@pytest.mark.parametrize("part", ["codecs", "link", "swap", "training"])
def test_tables_have_a_line_per_row(results, part):
    document = results[part]
    lines = tables.markdown(document).splitlines()
    cells = {line.count("|") for line in lines if line.startswith("|")}
    assert len(cells) == 1
    assert len(lines) == 2 + len(document["rows"]) + len(document["skipped"])
    if part == "training":
        assert "OutOfMemoryError: made up" in lines[-1]
    assert tables.markdown({**document, "complete": False}).endswith("cut short.")


# ------------------------------------------------------------------- meter


def test_a_gpu_is_timed_by_its_own_events_with_cold_caches(monkeypatch):
    log = []

    class Event:
        def __init__(self, **options):
            assert options == {"enable_timing": True}

        def record(self):
            log.append("event")

        def elapsed_time(self, _end):
            return 4.0

    meter = object.__new__(CudaMeter)
    meter.device = torch.device("cuda", 0)
    monkeypatch.setattr(CudaMeter, "flush", lambda _: log.append("flush"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: log.append("wait"))
    timing = meter.time_s(lambda: log.append("run"), within_s=0.0)
    assert timing.median_s == 0.004
    once = ["flush", "event", "run", "event"]
    assert log == ["run", "flush", "wait", "run", "wait", *5 * once, "wait"]
