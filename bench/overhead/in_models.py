"""Time that a tensor's swap takes beyond its kernels and copies, in training steps of models.

Rows with cold caches (swapped.py) write 64 MiB before each call: what operators on large tensors
leave in the caches. Operators on tensors of 1 MiB leave more. Here the operators are those of
models whose saved tensors have 1 MiB each, and the clock runs in the two hooks alone.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from bench.overhead import swapped
from cswap.experiments.timing import Timing, timing_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LAYERS: Final = 12
CODECS: Final = ("raw", "zvc")
PEER: Final = "save_on_cpu"
STEPS: Final = 4
"""Counted steps of a way in a row, after one that is not counted: training repeats its step."""

UNCOUNTED: Final = 2
"""Rounds before the first that counts: an engine learns."""


class _Clocked:
    """The hooks of one way, with a clock in them."""

    def __init__(self, way: swapped.Way) -> None:
        self._way = way
        self.seconds = 0.0
        self.n_saved = 0

    def pack(self, x: Tensor) -> Tensor | list[object]:
        if x.nbytes < swapped.NUMEL * x.itemsize:
            return x  # a weight
        start = time.perf_counter()
        packed = self._way.out(x, self.n_saved)
        self.seconds += time.perf_counter() - start
        self.n_saved += 1
        return [packed, x.shape]

    def unpack(self, packed: Tensor | list[object]) -> Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        sizes = packed.pop()
        assert isinstance(sizes, torch.Size)
        start = time.perf_counter()
        found = self._way.back(packed.pop())  # what is packed dies here, while the clock runs
        self.seconds += time.perf_counter() - start
        return found.view(sizes)


class _Sigmoids(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 * LAYERS):
            x = torch.sigmoid(x)
        return x


def _models() -> dict[str, tuple[nn.Module, Tensor]]:
    # All of their saved tensors are different ones.
    linear = [layer for _ in range(LAYERS) for layer in (nn.Linear(256, 256), nn.GELU())]
    convolution = [
        layer for _ in range(LAYERS) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.GELU())
    ]
    return {
        "linear layers": (nn.Sequential(*linear), torch.randn(1024, 256)),
        "convolutions": (nn.Sequential(*convolution), torch.randn(4, 16, 64, 64)),
        "pointwise operators": (_Sigmoids(), torch.randn(swapped.NUMEL, requires_grad=True)),
    }


def _step(model: nn.Module, x: Tensor, way: swapped.Way) -> float:
    # Seconds per saved tensor.
    hooks = _Clocked(way)
    way.begin()
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        loss = model(x).sum()
    loss.backward()
    return hooks.seconds / hooks.n_saved


def _ways() -> dict[str, Callable[[], swapped.Way]]:
    ways: dict[str, Callable[[], swapped.Way]] = {PEER: swapped.of_save_on_cpu}
    for codec in CODECS:
        ways[codec] = partial(swapped.swap, codec)
        ways[f"kernels of {codec}"] = partial(swapped.kernels, codec, 2 * LAYERS)
        ways[f"kernels of {codec} by address"] = partial(swapped.by_address, codec, 2 * LAYERS)
    return ways


def measure(rounds: int) -> dict[str, dict[str, Timing]]:
    """Seconds of the two hooks per tensor of 1 MiB, by model and way, in turns.

    The ways are the engine with each of `CODECS`, their kernels as in `swapped.measure`, and
    `PEER`.

    Args:
        rounds: that count, of `STEPS` steps each.
    """
    torch.manual_seed(0)
    found = {}
    for name, (model, x) in _models().items():
        ways = {way: make() for way, make in _ways().items()}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for n in range(UNCOUNTED + rounds):
            for way, hooks in ways.items():
                steps = [_step(model, x, hooks) for _ in range(1 + STEPS)]
                if n >= UNCOUNTED:
                    seconds[way] += steps[1:]
        found[name] = {way: timing_of(s) for way, s in seconds.items()}
    return found
