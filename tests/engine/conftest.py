"""Fixtures of several files of tests of the engine."""

import pytest
import torch

from cswap.engine.recomputer import Recomputer
from cswap.engine.short_way import ShortWay


@pytest.fixture
def _chains_take_no_time(monkeypatch):
    # A busy machine may take longer than a tensor is worth.
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def taken(monkeypatch):
    """Per tensor computed again that has tried the short way: whether it took it."""
    found, pack = [], ShortWay.pack

    def noted(self, tensor, place):
        encoded = place.codec is not None
        packed = pack(self, tensor, place)
        if not encoded:
            found.append(packed is not None)
        return packed

    monkeypatch.setattr(ShortWay, "pack", noted)
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
