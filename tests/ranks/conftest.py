"""Starts the two processes of two_ranks.py, and reads what they report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("two_ranks.py")

MOST_S = 280
"""Seconds after which both processes are killed: a collective that one of them lacks blocks."""


def run_both(forked, folder, names):
    """What each rank reports: [2] dicts by case."""
    text, rest = SCRIPT.read_text("utf-8"), [str(folder), json.dumps(names)]
    jobs = [(text, [str(rank), *rest]) for rank in (0, 1)]
    ended = forked.run_all(jobs, timeout=MOST_S, OMP_NUM_THREADS="1")
    said = "\n".join(done.stderr for done in ended)
    assert [done.returncode for done in ended] == [0, 0], said
    files = ((folder / f"{rank}.jsonl").read_text(encoding="utf-8") for rank in (0, 1))
    return [{line["case"]: line for line in map(json.loads, text.splitlines())} for text in files]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, forked):
    """Runs cases of two_ranks.py once, together with all others of the same list of names."""
    reports: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def reported(names, case):
        if names not in reports:
            reports[names] = run_both(forked, tmp_path_factory.mktemp("ranks"), names)
        found = [report[case] for report in reports[names]]
        errors = [str(report["error"]) for report in found if "error" in report]
        assert not errors, "\n".join(errors)
        return found

    return reported
