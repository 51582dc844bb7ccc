"""The Python time that other libraries' offloading takes for a tensor, beside cswap's.

As in over_a_link.py, the calls of the device take no time: streams, events and copies do nothing.
That is in the peers' favour, since they make more of these calls. They need a backward: each tensor
is saved by a node of its own, and what the same step takes without hooks is subtracted.
"""

from __future__ import annotations

import importlib
import time
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from bench.overhead.hook_costs import Cost, cost_of
from bench.overhead.over_a_link import LATE, NUMEL, SETTLING, TENSORS, IdleStream, idle_device
from bench.workloads.methods import why_missing
from bench.workloads.modes import PINS
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.experiments.meters.timing import timing_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

OVER_A_LINK: Final = "over a link whose calls take no time, in a backward"
PEERS: Final = {
    "torchtune OffloadActivations": "torchtune.training._activation_offloading",
    "TRL OffloadActivations": "trl.models.activation_offloading",
}
"""Modules of other libraries with an `OffloadActivations`."""

CODECS: Final = {"cswap raw": "raw", "cswap, a codec whose size is known late": LATE}


class _Saves(torch.autograd.Function):
    # A node that saves one tensor.

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        assert len(ctx.saved_tensors) == 1
        return gradient, None


class _Torch:
    # What the peers' modules see of torch: a device that is the CPU, and never busy.

    def __init__(self) -> None:
        stream = IdleStream()
        self.cuda = SimpleNamespace(
            Stream=IdleStream,
            stream=lambda _stream: nullcontext(),
            default_stream=lambda: stream,
            current_stream=lambda: stream,
            empty_cache=lambda: None,
        )
        self.accelerator = SimpleNamespace(
            current_accelerator=lambda: SimpleNamespace(type="cpu")  # where the tensors are
        )

    def get_device_module(self, _kind: str) -> SimpleNamespace:
        return self.cuda

    def empty_like(self, x: Tensor, **_: object) -> Tensor:
        return torch.empty_like(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def measure(steps: int) -> list[Cost]:
    """A row for each pair of hooks: microseconds of a tensor's way out and back, of all threads.

    Args:
        steps: counted steps of each.
    """
    found: dict[str, list[float]] = {}
    with idle_device() as made:
        for name, codec in CODECS.items():
            engine = SwapEngine(SwapConfig(codec=codec, min_bytes=0), device=made)
            hooks = saved_tensors_hooks(engine.pack, engine.unpack)
            found[name] = _above_plain(hooks, engine.begin_step, steps)
            engine.close()
    with _nothing_is_copied():
        found["save_on_cpu"] = _above_plain(save_on_cpu(PINS), _nothing, steps)
        peers = [_peer(name, path, steps) for name, path in PEERS.items()]
    return [_cost(name, seconds) for name, seconds in found.items()] + peers


def _cost(name: str, seconds: list[float]) -> Cost:
    return cost_of(name, OVER_A_LINK, timing_of(seconds))


def _peer(name: str, path: str, steps: int) -> Cost:
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        return Cost(name, OVER_A_LINK, why=why_missing(path.partition(".")[0], error))
    with patch.object(module, "torch", _Torch()):
        return _cost(name, _above_plain(module.OffloadActivations(), _nothing, steps))


def _nothing() -> None:
    pass


@contextmanager
def _nothing_is_copied() -> Iterator[None]:
    with ExitStack() as stack:
        for name, stand_in in {
            "copy_": lambda x, *_, **__: x,
            "to": lambda x, *_, **__: torch.empty_like(x),
            "record_stream": lambda *_: None,
        }.items():
            stack.enter_context(patch.object(torch.Tensor, name, stand_in))
        yield


def _above_plain(hooks: Any, begin: Callable[[], None], steps: int) -> list[float]:
    # Seconds per tensor above those of the same step without hooks, in turns.
    found = []
    for step in range(SETTLING + steps):
        seconds = _seconds(hooks, begin) - _seconds(nullcontext(), _nothing)
        if step >= SETTLING:
            found.append(seconds / TENSORS)
    return found


def _seconds(hooks: Any, begin: Callable[[], None]) -> float:
    begin()
    tensors = [torch.empty(NUMEL) for _ in range(TENSORS)]
    x = y = torch.zeros(1, requires_grad=True)
    start_s = time.process_time()
    with hooks:
        while tensors:
            y = _Saves.apply(y, tensors.pop())
    y.backward()
    took_s = time.process_time() - start_s
    assert x.grad is not None
    return took_s
