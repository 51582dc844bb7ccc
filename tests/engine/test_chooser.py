"""The engine does for each tensor what a chooser says, or where it says nothing its advisor."""

from __future__ import annotations

from collections import deque

import pytest
import torch

import cswap
from cswap.engine.order.chooser import Choice

N = 1 << 12


class Told:
    """A chooser that says the same of every tensor."""

    def __init__(self, choice, *, stays=False):
        self._choice, self._stays = choice, stays
        self.took: deque[tuple[int, int, float]] = deque()

    def begin_step(self):
        pass

    def keeps(self, tensor, scope):
        return self._stays

    def choose(self, tensor, handle, again_s, candidates):
        return self._choice

    def enter(self):
        return None

    def packed(self, tensor, packed, entered):
        assert entered is None

    def settle(self):
        pass

    def used(self):
        pass

    def unpacked(self, packed, tensor, entered):
        assert entered is None

    def missed(self):
        pass


@pytest.mark.parametrize(
    ("chooser", "kept", "codecs"),
    [
        (Told(None), {}, {"raw"}),
        (Told(Choice("zvc")), {}, {"zvc"}),
        (Told(Choice("keep")), {"goal": 1}, set()),
        (Told(Choice("remat")), {"goal": 1}, set()),  # with a codec nothing is computed again
        (Told(Choice("zvc"), stays=True), {"goal": 1}, set()),
    ],
    ids=["nothing", "a codec", "keep", "remat", "no look"],
)
def test_what_a_chooser_says_is_done(chooser, kept, codecs):
    x = torch.zeros(N, requires_grad=True)
    with cswap.swapping(min_bytes=0, codec="raw") as engine:
        engine.choose_by(chooser)
        y = (x * 1).exp()
        stats = engine.stats
        assert (stats.kept_by_reason, set(stats.by_codec)) == (kept, codecs)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, torch.ones(N))
