"""Starts the two processes of two_ranks.py, and reads what they report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("two_ranks.py")

MOST_S = 280
"""Seconds after which it is given up. A collective that one rank lacks blocks the other one, until
that ends by itself (`WAIT` of two_ranks.py)."""

PAIR = """
import os, sys
import torch._dynamo, torch.distributed.optim  # DDP would, in each rank: that takes seconds

script, *rest = sys.argv[1:]
pids = []
for rank in ("0", "1"):
    pid = os.fork()
    if pid == 0:
        sys.argv = [script, rank, *rest]
        with open(script, encoding="utf-8") as file:
            text = file.read()
        exec(compile(text, script, "exec", dont_inherit=True))
        break
    pids.append(pid)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0], codes
"""
"""Becomes the two ranks."""


def run_both(forked, folder, names):
    """What each rank reports: [2] dicts by case."""
    rest = [SCRIPT, folder, json.dumps(names)]
    done = forked.run(PAIR, *rest, timeout=MOST_S, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
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
