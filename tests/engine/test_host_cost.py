"""How much Python a swapped tensor costs: calls are counted, since times differ from run to run."""

import sys
from collections import Counter

import pytest
import torch

from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from tests.engine.looks import look_every

MOST_CALLS_AGAIN = 32
"""Of pack, unpack and release of a tensor that is computed again at a known place."""

N = 8
"""Tensors per step."""

MOST_CALLS = {"raw": 38, "zvc": 55}
"""Of pack, unpack and release together, by a slot (`cswap.engine.replay`), codecs' own included.

Lower these when the way gets shorter."""

MOST_CALLS_GENERAL_WAY = {"raw": 106, "zvc": 122}
"""The same with a handle."""


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


@pytest.mark.parametrize("most", [MOST_CALLS, MOST_CALLS_GENERAL_WAY], ids=["slots", "general"])
@pytest.mark.parametrize("codec", MOST_CALLS)
def test_python_calls_of_a_swapped_tensor(codec, most, monkeypatch):
    if most is MOST_CALLS_GENERAL_WAY:
        look_every(monkeypatch, 1)
    engine = SwapEngine(SwapConfig(codec=codec, min_bytes=0, remat=False))
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
    assert min(calls) <= most[codec]
    engine.close()


@pytest.mark.usefixtures("by_price")
def test_python_calls_of_a_tensor_that_is_computed_again(monkeypatch):
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-6)
    engine = SwapEngine(SwapConfig(min_bytes=0))
    leaf = torch.randn(1 << 16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack)

    def step():
        engine.begin_step()
        kept, tensors = [], []
        for _ in range(N):
            with hooks:
                y = torch.nn.functional.gelu(leaf * 1.0)
            kept.append(y.grad_fn)
            tensors.append(y)
        del y
        packed, out = counted(lambda: [engine.pack(tensors.pop(0)) for _ in range(N)])
        with torch.no_grad():  # as in backward
            _, back = counted(lambda: [engine.unpack(packed.pop()) for _ in range(N)])
        _, release = counted(engine.collect)
        return (out + back + release) / N

    calls = [step() for _ in range(8)]
    assert engine.stats.by_codec["remat"].count == N * len(calls)
    assert min(calls) <= MOST_CALLS_AGAIN
    engine.close()
