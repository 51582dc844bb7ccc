"""The examples in docs/examples run as they stand, where their packages are installed."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks' own


def test_with_trainer(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "with_trainer.py"))["main"]
    history = main(["--cswap_min_bytes", "1KiB", "--cswap_workers", "0"]).state.log_history
    assert [entry["cswap/saved_mib"] > 0 for entry in history if "loss" in entry] == [True] * 3


def test_with_lightning(monkeypatch, tmp_path):
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "with_lightning.py"))["main"]
    assert main().stats.swapped > 0
