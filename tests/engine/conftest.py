"""Fixtures of several files of tests of the engine."""

import pytest
import torch

from cswap.engine.recomputer import Recomputer
from cswap.engine.replay.again_slot import AgainSlot


@pytest.fixture
def _same_numbers():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _chains_take_no_time(monkeypatch, _same_numbers):
    # A busy machine may take longer than a tensor is worth.
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-5)


@pytest.fixture
def taken(monkeypatch):
    """Per tensor whose place has a slot to compute it again: whether the slot took it."""
    found, stands, take = [], AgainSlot.stands, AgainSlot.take

    def noted_stands(self, *args):
        does = stands(self, *args)
        if not does:
            found.append(False)
        return does

    def noted_take(self, *args):
        packed = take(self, *args)
        found.append(packed is not None)
        return packed

    monkeypatch.setattr(AgainSlot, "stands", noted_stands)
    monkeypatch.setattr(AgainSlot, "take", noted_take)
    return found


@pytest.fixture
def computed(monkeypatch):
    """How often a tensor was computed again."""
    found, run = [], Recomputer.run

    def noted(self, remat):
        found.append(remat.formula.operator)
        return run(self, remat)

    monkeypatch.setattr(Recomputer, "run", noted)
    return found
