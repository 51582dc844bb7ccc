"""Ctrl-C at random moments of a training: it arrives, and nothing is wrong or held afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_a_ctrl_c_arrives_and_leaves_nothing_behind(codec, forked):
    interrupt(forked, codec, tries=12)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_many_a_ctrl_c_arrives_and_leaves_nothing_behind(codec, forked):
    interrupt(forked, codec, tries=50)


def interrupt(forked, codec, tries):
    """Train under that many interrupts, at other moments each."""
    program = Path(__file__).with_name("interrupted_training.py")
    # In a process of its own: an interrupt that comes late would end pytest.
    done = forked.run(program.read_text("utf-8"), codec, tries, 0, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == dict.fromkeys(found, 0)
    assert len(found) == 8  # all that is looked at
