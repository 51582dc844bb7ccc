"""A test run records the versions that it passed with, and only then."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from bench.pages import versions

ROOT = Path(__file__).resolve().parents[2]


def test_a_row_replaces_that_of_the_same_environment_and_tests(tmp_path):
    file = tmp_path / "versions.json"
    old = versions.row("tests/a", 1, 0)
    other = {**old, "torch": "2.6.0"}
    for one in (old, other, {**old, "passed": 2}):
        versions.record(one, file)
    found = {one["torch"]: one["passed"] for one in versions.rows(file)}
    assert found == {old["torch"]: 2, "2.6.0": 1}
    assert len(versions.rows(file)) == 2


PYTEST = """
import os, sys
import pytest
os.chdir(sys.argv[1])
raise SystemExit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_is_recorded_if_it_passed(tmp_path, broken, forked):
    file, more = tmp_path / "versions.json", tmp_path / "test_more.py"
    more.write_text(f"def test_x():\n    assert {not broken}\n")
    fine = "tests/project/test_changelog.py"
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "--record-versions", file]
    done = forked.run(PYTEST, ROOT, fine, more, *options)
    assert done.returncode == broken, done.stdout + done.stderr
    assert file.exists() != broken
    if not broken:
        (row,) = json.loads(file.read_text())
        assert row["python"] == platform.python_version()
        assert row["passed"] >= 2
        assert row["tests"] == f"{fine} {more}"


def test_the_committed_rows_are_of_runs():
    for row in versions.rows():
        assert set(row) == {*versions.WHICH, "passed", "skipped", "on"}
        assert row["passed"] > 0
        assert row["python"]
        assert row["torch"]
        assert row["tests"]
