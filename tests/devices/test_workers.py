"""How many threads encode and decode beside a CPU's computation, if no option says it."""

from __future__ import annotations

import os
import threading
import time
from typing import Final

import pytest
import torch

import cswap
from cswap.codecs.registry import get_codec

PATIENCE_S: Final = 5.0


@pytest.fixture
def encoders(monkeypatch):
    """Threads that have encoded by zvc, in order."""
    train()  # compiles zvc, with a trial in this thread
    zvc, threads = get_codec("zvc"), []
    encode = zvc.encode_flat

    def encode_flat(*args, **kwargs):
        threads.append(threading.current_thread())
        return encode(*args, **kwargs)

    monkeypatch.setattr(zvc, "encode_flat", encode_flat)
    return threads


def train(between=lambda: None, **options):
    """One step. Args: between: called between forward and backward."""
    x = torch.rand(1 << 16, requires_grad=True)
    with cswap.swapping(codec="zvc", min_bytes=0, remat=False, **options):
        loss = (x.exp() * x).sum()
        between()
        loss.backward()


def is_beside(encoders, **options):
    """Whether a worker encodes the first tensor; backward, which could do it, waits for that."""
    encoders.clear()

    def wait():
        deadline = time.monotonic() + PATIENCE_S
        while not encoders and time.monotonic() < deadline:
            time.sleep(0.001)

    train(wait, **options)
    return encoders[0] is not threading.current_thread()


@pytest.mark.parametrize(
    ("cores", "of_torch", "spills", "beside"),
    [
        pytest.param(8, 8, False, False, id="torch uses every core"),
        pytest.param(8, 64, False, False, id="torch has more threads than there are cores"),
        pytest.param(8, 6, False, True, id="torch leaves two cores"),
        pytest.param(8, 8, True, True, id="a disk makes its thread wait without a core"),
    ],
)
def test_workers_take_the_cores_that_torch_leaves(
    monkeypatch, tmp_path, encoders, cores, of_torch, spills, beside
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    options = {"spill_dir": tmp_path} if spills else {}
    assert is_beside(encoders, **options) == beside


def test_the_option_says_how_many(monkeypatch, encoders):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert not is_beside(encoders)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert is_beside(encoders)
