"""The GPU benchmarks' peers, driven by stand-ins: numpy for cupy, scipy for cupyx, and of torchao
the few functions that are called (or torchao itself, where it is installed)."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("typer")

from bench.gpu import codecs, peers
from bench.gpu.contenders import PeerContender
from bench.gpu.peers import PEERS, Peer
from bench.gpu.report import Report
from bench.gpu.samples import DENSE, DENSE_HALF, RELU_85, Sample
from cswap.experiments.timing import timing_of

CPU = torch.device("cpu")
METER: Any = SimpleNamespace(
    device=CPU,
    stream=None,
    synchronize=lambda: None,
    isolate=lambda: None,
    time_s=lambda run, within_s: timing_of([(run(), 1e-3)[1]]),
    launch_us=lambda run: (run(), 1.0)[1],
)


def scale_of(rows):
    return rows.float().abs().amax(1, keepdim=True)


def fake_torchao():
    int8 = SimpleNamespace(
        MappingType=SimpleNamespace(SYMMETRIC="symmetric"),
        choose_qparams_affine=lambda x, _mapping, _block, _dtype: (scale_of(x) / 127.5, 0),
        quantize_affine=lambda x, _block, scale, _zero, dtype: (
            (x / scale).round().clamp(-128, 127).to(dtype)
        ),
        dequantize_affine=lambda q, _block, scale, _zero, _dtype, output_dtype: (
            q.float() * scale
        ).to(output_dtype),
    )
    return {
        "torchao.quantization": SimpleNamespace(quant_primitives=int8),
        "torchao.float8.config": SimpleNamespace(
            ScalingGranularity=SimpleNamespace(AXISWISE="axiswise")
        ),
        "torchao.float8.float8_utils": SimpleNamespace(
            tensor_to_scale=lambda x, _dtype, scaling_granularity, axiswise_dim: 448 / scale_of(x),
            to_fp8_saturated=lambda x, dtype: x.clamp(-448, 448).to(dtype),
        ),
    }


@pytest.fixture
def stand_ins(monkeypatch):
    modules: dict[str, Any] = {"cupy": np, "cupyx": ModuleType("cupyx")}
    modules["cupyx.scipy"] = SimpleNamespace(sparse=pytest.importorskip("scipy.sparse"))
    if not find_spec("torchao"):
        modules |= {"torchao": ModuleType("torchao"), **fake_torchao()}
        modules["torchao.float8"] = ModuleType("torchao.float8")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Peer, "missing", lambda _self: None)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    "sample", [RELU_85, DENSE, DENSE_HALF, Sample("mask", torch.bool)], ids=str
)
@pytest.mark.usefixtures("stand_ins")
def test_peers_give_back_what_they_encoded(name, sample):
    peer = PEERS[name]
    if name not in peers.beside([peer.beside], sample.dtype):
        assert sample.dtype not in peer.dtypes
        return
    x = sample.make(64 << 10, CPU)
    contender = PeerContender(peer, x, METER)  # compares; bits, where the peer is lossless
    assert contender.settle() == contender.nbytes
    assert contender.error < 0.05
    if not peer.lossless:
        assert x.nbytes / contender.nbytes == pytest.approx(x.itemsize / (1 + 4 / 128), rel=0.02)
    elif sample == RELU_85:
        assert x.nbytes / contender.nbytes > 3


@pytest.mark.usefixtures("stand_ins")
def test_compaction_keeps_negative_zeros_and_values_at_both_ends():
    peer = PEERS["cupy compaction"]
    for x in (torch.tensor([0.0, -0.0, 2.0]), torch.tensor([1.0, 0.0, 0.0]), torch.ones(9)):
        back = peer.decode(peer.encode(x), x)
        assert torch.equal(back.view(torch.int32), x.view(torch.int32))


@pytest.mark.usefixtures("stand_ins")
def test_peers_are_measured_beside_their_codecs(tmp_path):
    report = Report(tmp_path, "codecs", METER, {"name": "made up"})
    nbytes = 8 << 10
    plan = codecs.Plan((), nbytes, (nbytes,), 0.0)
    codecs.run(METER, report, plan)
    rows = {r["codec"]: r for r in report.document["rows"] if r["dtype"] == "float32"}
    assert {"zvc", "cupy compaction", "int8", "torchao int8", "fp8", "torchao fp8"} <= set(rows)
    assert rows["cupy compaction"]["lossless"]
    assert rows["cupy compaction"]["encode_of_copy"] == 1.0


def test_a_peer_that_is_not_installed_is_taken_down_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda _package: None)
    report = Report(tmp_path, "codecs", METER, {"name": "made up"})
    codecs.run(METER, report, codecs.Plan((), 8 << 10, (8 << 10,), 0.0))
    skipped = {s["what"]: s["why"] for s in report.document["skipped"]}
    assert skipped["cupyx csr_matrix"] == "cupyx is not installed"
    assert skipped["torchao fp8"] == "torchao is not installed"
    assert "nvCOMP" in skipped
    assert not set(PEERS) & {r["codec"] for r in report.document["rows"]}
