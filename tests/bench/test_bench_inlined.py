"""`python -m bench inlined`: every way is measured on compiled models."""

from __future__ import annotations

import json
from functools import partial

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")

import torch
from typer.testing import CliRunner

import cswap
from bench.__main__ import app
from bench.inlined import measure

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]


@pytest.mark.slow
def test_graphs_save_less_with_inlined_codecs(tmp_path, monkeypatch):
    compiler = torch.compile

    def without_code(model):
        return compiler(model, backend="aot_eager_decomp_partition")

    monkeypatch.setattr(torch, "compile", without_code)
    for way, lossy in (("inlined, masks alone", "off"), ("inlined bf16", "bf16")):
        monkeypatch.setitem(measure.WAYS, way, partial(cswap.inlined, lossy, min_bytes=256))
    monkeypatch.setitem(measure.WAYS, "inlined int8", partial(cswap.inlined, "int8", min_bytes=256))
    out, threads = tmp_path / "inlined.json", torch.get_num_threads()
    options = ["inlined", "--quick", "--models", "gpt", "--steps", "1", "--out", str(out)]
    try:
        result = CliRunner().invoke(app, options, env={"COLUMNS": "200"})
    finally:
        torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    rows = {row["way"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [*measure.WAYS, measure.SWAPPED]
    assert rows["plain"]["saved_of_plain"] == 1
    assert rows["plain"]["gradient_error"] == 0
    # A graph that saves something else is fused otherwise: the last bit depends on the machine.
    assert rows["inlined, masks alone"]["gradient_error"] < 1e-6
    assert rows["inlined int8"]["saved_of_plain"] < rows["inlined bf16"]["saved_of_plain"] < 1
    assert 0 < rows["inlined bf16"]["gradient_error"] < rows["inlined int8"]["gradient_error"] < 0.1
