"""`python -m bench codecs`: synthetic families, pictures and the result file."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from bench.__main__ import app
from bench.codecs import command
from bench.codecs import synthetic as families
from bench.codecs.plots import draw
from bench.codecs.synthetic import (
    SHARES,
    VOCABULARY,
    random_zeros,
    runs_of_zeros,
    synthetic,
    zipf,
)
from cswap.experiments.codecs.case import Case
from cswap.experiments.codecs.contenders import measure


@pytest.fixture(autouse=True)
def short_readings(monkeypatch):
    monkeypatch.setattr("cswap.experiments.timing.SETTLE_S", 0.0)
    monkeypatch.setattr("cswap.experiments.codecs.contenders.MOST_REPEATS", 1)


def run(*arguments):
    options = ["--quick", "--threads", "1", *map(str, arguments)]
    return CliRunner().invoke(app, ["codecs", *options], env={"COLUMNS": "200"})


@pytest.mark.parametrize("where", [random_zeros, runs_of_zeros])
@pytest.mark.parametrize("share", SHARES)
def test_the_share_of_zeros_is_exact(where, share):
    n = 10_001
    mask = where(n, share, np.random.default_rng(0))
    assert mask.shape == (n,)
    assert int(mask.sum()) == round(n * share)


def test_zeros_in_runs_come_in_runs():
    mask = runs_of_zeros(1 << 18, 0.3, np.random.default_rng(0)).int()
    n_runs = int((mask.diff() == 1).sum()) + int(mask[0])
    assert 50 < int(mask.sum()) / n_runs < 80
    scattered = random_zeros(1 << 18, 0.3, np.random.default_rng(0)).int()
    assert int(scattered.sum()) / int((scattered.diff() == 1).sum()) < 2


def test_token_ids_are_zipfs():
    ids = zipf(200_000, np.random.default_rng(0))
    assert ids.dtype == np.int64
    assert 0 <= ids.min() <= ids.max() < VOCABULARY
    counts = np.bincount(ids, minlength=4)
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.05)
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("family", ["sparsity", "values", "sizes"])
def test_cases_make_the_tensor_that_they_say_and_the_same_one_each_time(family):
    cases = synthetic(family, quick=True)
    assert len({(c.data, c.zeros, c.nbytes, str(c.make().dtype)) for c in cases}) == len(cases)
    for case in cases:
        x = case.make()
        assert x.nbytes == case.nbytes
        assert x.ndim == 1
        assert torch.equal(x, case.make())
        if case.zeros is not None:
            assert int((x == 0).sum()) == round(x.numel() * case.zeros)


def test_sizes_reach_from_4_kib_to_1_gib():
    sizes = {case.nbytes for case in synthetic("sizes", quick=False)}
    assert sorted(sizes) == [4096 * 4**i for i in range(10)]
    assert max(sizes) == 1 << 30


@pytest.mark.slow
def test_families_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "record", lambda nbytes, *, quick: [])
    monkeypatch.setattr(families, "SHARES", (0.5,))
    out = tmp_path / "codecs.json"
    result = run("--families", "recorded,sparsity,values", "--out", out, "--codecs", "zvc,csr")
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert (document["version"], document["complete"]) == (2, True)
    key = ("family", "data", "dtype", "nbytes", "zeros", "codec")
    rows = {tuple(row[k] for k in key): row for row in document["rows"]}
    assert len(rows) == len(document["rows"])
    assert {r["family"] for r in rows.values()} == {"sparsity", "values"}
    assert ("sparsity", "zeros in runs", "bfloat16", 262144, 0.5, "csr") in rows
    random = ("sparsity", "random zeros", "float32", 262144, 0.5)
    half = rows[(*random, "zvc")]
    assert half["ratio"] == pytest.approx(1 / (0.5 + 1 / 32), rel=0.01)
    memcpy = rows[(*random, "memcpy")]
    assert memcpy["encode_of_memcpy"] == memcpy["ratio"] == 1
    quotient = memcpy["encode"]["median_s"] / half["encode"]["median_s"]
    assert half["encode_of_memcpy"] == pytest.approx(quotient)


def test_sizes_are_measured_and_drawn(tmp_path):
    out = tmp_path / "codecs.json"
    assert run("--families", "sizes", "--out", out, "--codecs", "raw").exit_code == 0
    assert list(tmp_path.glob("*.png")) == [tmp_path / "codecs-sizes.png"]


def test_what_does_not_fit_in_memory_is_taken_down_as_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.codecs.command.host_available_bytes", lambda: 1 << 20)
    out = tmp_path / "codecs.json"
    assert run("--families", "sizes", "--out", out, "--codecs", "raw").exit_code == 0
    document = json.loads(out.read_text())
    assert max(r["nbytes"] for r in document["rows"]) == 64 << 10
    assert len(document["skipped"]) == 4
    assert "1048576 are free" in document["skipped"][0]


def test_a_part_of_a_run_does_not_replace_the_committed_results(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "SHARES", ())
    monkeypatch.chdir(tmp_path)
    assert run("--families", "sparsity", "--codecs", "raw").exit_code == 0
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_result_is_written_and_the_reason_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "codecs.json"
    result = run("--families", "sizes", "--out", out, "--codecs", "raw")
    assert result.exit_code == 0, result.output
    assert "No pictures: pictures need matplotlib" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["codecs.json"]


def test_a_lossy_codec_that_leaves_something_of_zeros_is_told():
    case = Case("own", "zeros", 4096, lambda: torch.zeros(1024))
    rows = {row.codec: row for row in measure(case, 1, ("zvc", "int8"))}
    assert rows["int8"].relative_rms_error == 0
    assert rows["zvc"].ratio > 10


def sweep(codec, ratios, seconds):
    times = [{"low_s": s, "median_s": s, "high_s": s} for s in seconds]
    return [
        {
            "family": "sparsity",
            "data": "random zeros",
            "dtype": "float32",
            "codec": codec,
            "zeros": i / 2,
            "ratio": ratio,
            "nbytes": 10**9,
            "encode": t,
            "decode": t,
            "encode_gb_per_s": 1 / t["median_s"],
            "decode_gb_per_s": 1 / t["median_s"],
        }
        for i, (ratio, t) in enumerate(zip(ratios, times, strict=True))
    ]


def test_a_sweep_is_drawn(tmp_path):
    rows = [*sweep("zvc", [1, 2, 10], [1, 1, 1]), *sweep("csr", [1, 1.6, 20], [2, 1.5, 0.5])]
    assert [p.name for p in draw({"rows": rows}, tmp_path, "x")] == ["x-sparsity-float32.png"]
