"""Fixtures of several files of tests of the engine."""

import pytest
import torch


@pytest.fixture
def _chains_take_no_time(monkeypatch):
    # A busy machine may take longer than a tensor is worth.
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
