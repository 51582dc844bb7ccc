"""How much Python a swapped tensor costs: calls are counted, since times differ from run to run."""

import sys
from collections import Counter

import pytest
import torch

from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine

N = 8
"""Tensors per step."""

MOST_CALLS = {"raw": 83, "zvc": 99}
"""Of pack, unpack and release together. Lower these when the way gets shorter."""


def counted(run):
    """(result, Python calls) of ``run()`` in this thread."""
    calls: Counter[str] = Counter()

    def note(frame, event, _argument):
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        return run(), calls.total() - 1
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("codec", MOST_CALLS)
def test_python_calls_of_a_swapped_tensor(codec):
    engine = SwapEngine(SwapConfig(codec=codec, min_bytes=0, workers=0, remat=False))
    x = torch.relu(torch.randn(1 << 10, generator=torch.Generator().manual_seed(0)))

    def step():
        engine.begin_step()
        tensors = [x.clone() for _ in range(N)]
        packed, out = counted(lambda: [engine.pack(tensors.pop()) for _ in range(N)])
        _, back = counted(lambda: [engine.unpack(packed.pop()) for _ in range(N)])
        _, release = counted(engine.collect)
        return (out + back + release) / N

    calls = [step() for _ in range(8)]
    assert engine.stats.swapped == N * len(calls)
    assert min(calls) <= MOST_CALLS[codec]
    engine.close()
