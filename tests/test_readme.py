"""The figures in README.md and docs are those of the committed result files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def readme(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "bench", "readme", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_tables_are_made_from_the_committed_results():
    done = readme("--check")
    assert done.returncode == 0, done.stderr


def test_a_stale_table_is_noticed(tmp_path):
    import shutil

    for name in ("bench", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    page = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(page.replace("| cnn off |", "| cnn of |", 1))
    done = readme("--check", cwd=tmp_path)
    assert done.returncode == 1
    assert "README.md is stale" in done.stderr
