"""An installed model, and a count of the tensors that come to the hooks."""

from __future__ import annotations

from collections import Counter

import pytest

import cswap
from cswap.hooks import HookPair


@pytest.fixture
def install():
    handles = []

    def make(model, **options):
        options = {"min_bytes": 1024, **options}
        handles.append(cswap.install(model, **options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.remove()


@pytest.fixture
def packs(monkeypatch):
    """How many tensors came to the pack hook, by their number of elements."""
    counts: Counter[int] = Counter()
    pack = HookPair.pack

    def counted(pair, tensor):
        counts[tensor.numel()] += 1
        return pack(pair, tensor)

    monkeypatch.setattr(HookPair, "pack", counted)
    return counts
