"""`python -m bench advisor` end to end on small models."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from bench.__main__ import app
from bench.advisor import command
from bench.advisor.report import KEYS
from cswap.advisor import calibrate, link


@pytest.mark.parametrize(
    "models",
    [
        pytest.param(("cnn",), id="few", marks=pytest.mark.slow),
        pytest.param(("cnn", "gpt"), id="all", marks=pytest.mark.slow),
    ],
)
def test_every_cell_is_compared_and_the_oracle_is_the_best(models, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "MODELS", models)
    monkeypatch.setattr(command, "N_THREADS", 1)
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    monkeypatch.setattr(link, "ROUNDS", 1)
    monkeypatch.setitem(calibrate.SIZES, "cpu", (1 << 14, 1 << 16, 1 << 18))
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path))  # the command sets one of its own
    out = tmp_path / "advisor.json"
    result = CliRunner().invoke(app, ["advisor", "--quick", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert len(found["cells"]) == (len(models) + 1) * 2  # one unseen; modes
    assert {row["model"] for row in found["cells"] if row["unseen"]} == {"lstm"}
    for row in found["cells"]:
        best = row["oracle_s"] * (1 - 1e-9)
        assert all(row[key] >= best for key in KEYS.values()), row
    assert found["prediction"]["bitpack"]["median"] < 0.03
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
