"""The whole cost of a saved tensor with each pair of hooks, cswap's and others', in turns."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from bench.workloads.methods import METHODS, NotInstalledError
from bench.workloads.modes import PINS
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.experiments.meters.timing import Timing, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SMALL: Final = "64 B"
LARGE: Final = "1 MiB"
TENSORS: Final = {SMALL: (16, 512), LARGE: ((1 << 20) // 4, 48)}
"""Elements of float32, and calls per reading of the clock."""

STEP: Final = 4
"""Tensors that are packed before they are unpacked, in the opposite order."""

PEERS: Final = ("TRL OffloadActivations", "torchtune OffloadActivations")
NOTE: Final = (
    "Whole cost of a call of pack and one of unpack, codecs and copies included, in steps of four "
    "tensors; 64 B stay with cswap. Of checkpoint: a block's forward and backward above those "
    "without it."
)


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Hooks:
    """A pair of hooks, and the call that begins a step, where one is wanted."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]
    begin: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of one call of pack and one of unpack together.

    Attributes:
        hooks: name of the pair of hooks.
        tensor: size of the tensor.
        us: median microseconds; None if it cannot be measured here.
        low_us: 20 % quantile over the rounds.
        high_us: 80 % quantile.
        why: there is no figure.
    """

    hooks: str
    tensor: str
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    why: str | None = None


def measure(rounds: int) -> list[dict[str, Any]]:
    """A row per pair of hooks and tensor, as JSON-able values."""
    costs: list[Cost] = []
    hooks, missing = _hooks()
    for tensor, (n, repeats) in TENSORS.items():
        # Different ones, as in a model: a tensor that is saved twice is swapped once.
        tensors = [torch.relu(torch.randn(n)) for _ in range(STEP)]
        contenders = {name: _repeated(pair, tensors, repeats) for name, pair in hooks.items()}
        timings = interleaved(contenders, rounds=rounds)
        costs += [cost_of(name, tensor, t, repeats) for name, t in timings.items()]
        costs += [Cost(name, tensor, why=why) for name, why in missing.items()]
    costs.append(_checkpoint(rounds))
    return [asdict(cost) for cost in costs]


def figures(row: dict[str, Any]) -> list[str]:
    """A row's cells: hooks, tensor, microseconds, quantiles."""
    if row["us"] is None:
        return [row["hooks"], row["tensor"], "-", row["why"]]
    spread = f"{row['low_us']:.1f} ... {row['high_us']:.1f}"
    return [row["hooks"], row["tensor"], f"{row['us']:.1f}", spread]


def _same(x: Tensor) -> Tensor:
    return x


def _hooks() -> tuple[dict[str, Hooks], dict[str, str]]:
    # Pairs of pack and unpack by name; and why a peer has none.
    found = {"identity": Hooks(_same, _same), "save_on_cpu": _of(save_on_cpu(PINS))}
    for codec in ("raw", "zvc"):
        engine = SwapEngine(SwapConfig(codec=codec))
        found[f"cswap {codec}"] = Hooks(engine.pack, engine.unpack, engine.begin_step)
    missing = {}
    for method in METHODS:
        if method.name not in PEERS:
            continue
        try:
            found[method.name] = _of(method.around(PINS))
        except NotInstalledError as error:
            missing[method.name] = str(error)
        except Exception as error:  # they ask for a GPU in ways of their own
            text = (str(error).splitlines() or [""])[0][:200]
            missing[method.name] = f"cannot run on this device ({type(error).__name__}: {text})"
    return found, missing


def _of(hooks: Any) -> Hooks:
    return Hooks(hooks.pack_hook, hooks.unpack_hook)


def _repeated(hooks: Hooks, tensors: list[Tensor], repeats: int) -> Callable[[], None]:
    pack, unpack = hooks.pack, hooks.unpack

    def run() -> None:
        for _ in range(repeats // STEP):
            hooks.begin()
            packed = [pack(x) for x in tensors]
            while packed:
                unpack(packed.pop())

    return run


def cost_of(name: str, tensor: str, timing: Timing, repeats: int = 1) -> Cost:
    """A row. Args: timing: of so many calls; the others: see `Cost`."""
    us = 1e6 / repeats
    return Cost(name, tensor, us * timing.median_s, us * timing.low_s, us * timing.high_s)


def _twice(x: Tensor) -> Tensor:
    return x * 2


def _checkpoint(rounds: int) -> Cost:
    # Of a block of one multiplication of 64 B, which is done once more by the checkpoint.
    n, repeats = TENSORS[SMALL]
    x = torch.ones(n, requires_grad=True)
    blocks: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": _twice,
        "checkpoint": partial(checkpoint, _twice, use_reentrant=False),
    }

    def step(block: Callable[[Tensor], Tensor]) -> None:
        for _ in range(repeats):
            block(x).sum().backward()

    timings = interleaved({k: partial(step, b) for k, b in blocks.items()}, rounds=rounds)
    plain = timings["plain"].median_s
    above = Timing(*(s - plain for s in asdict(timings["checkpoint"]).values()))
    return replace(cost_of("checkpoint", "", above, repeats), tensor="a block of one operation")
