"""Starts the two processes of two_ranks.py, and reads what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("two_ranks.py")

MOST_S = 280
"""Seconds after which both processes are killed: a collective that one of them lacks blocks."""


def run_both(folder, names):
    """What each rank reports: [2] dicts by case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder), json.dumps(names)],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=MOST_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    files = ((folder / f"{rank}.jsonl").read_text(encoding="utf-8") for rank in (0, 1))
    return [{line["case"]: line for line in map(json.loads, text.splitlines())} for text in files]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Runs cases of two_ranks.py once, together with all others of the same list of names."""
    reports: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def reported(names, case):
        if names not in reports:
            reports[names] = run_both(tmp_path_factory.mktemp("ranks"), names)
        found = [report[case] for report in reports[names]]
        errors = [str(report["error"]) for report in found if "error" in report]
        assert not errors, "\n".join(errors)
        return found

    return reported
