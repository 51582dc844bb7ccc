"""Time that a tensor's swap takes beyond its kernels and copies, with warm and with cold caches.

A step packs `TENSORS` tensors and unpacks them in the opposite order, as forward and backward do.
Its kernels and copies alone are done in the same order. With cold caches, more memory than the
caches hold is written before each call, as a model's own operators do, and only the calls are
timed.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import torch
from torch.autograd.graph import save_on_cpu

from bench.workloads.modes import PINS
from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.layout import copy_bytes
from cswap.codecs.registry import get_codec
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.experiments.meters.timing import Timing, interleaved, timing_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TENSORS: Final = 4
"""Tensors of a step: for as many the engine keeps idle host memory between two steps."""

NUMEL: Final = (1 << 20) // 4
"""Elements of a tensor: 1 MiB of float32."""

EVICTED_BYTES: Final = 64 << 20
"""Memory that is written to make the caches cold."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of a step's tensors, out and back.

    Attributes:
        begin: called before each step.
        out: takes a tensor and its number in the step.
        back: takes the object that ``out`` returned.
    """

    begin: Callable[[], None]
    out: Callable[[Tensor, int], object]
    back: Callable[[object], Tensor]


def measure(codec: str, *, rounds: int, repeats: int, cold_rounds: int) -> dict[str, Timing]:
    """Seconds per tensor of 1 MiB: "swap", "kernels" and "kernels by address", with warm caches.

    With "cold " before their names, they are those with cold caches. "cold begin" are the seconds
    of a step's begin, for all of its tensors together. "kernels" are calls of the codec's
    functions, "kernels by address" those of its machine code alone.

    Args:
        codec: its name.
        rounds: counted rounds with warm caches.
        repeats: steps per reading of the clock with warm caches.
        cold_rounds: counted steps with cold caches.
    """
    ways = {
        "swap": swap(codec),
        "kernels": kernels(codec, TENSORS),
        "kernels by address": by_address(codec, TENSORS),
    }
    tensors = [torch.relu(torch.randn(NUMEL)) for _ in range(TENSORS)]
    warm = interleaved(
        {name: _steps(way, tensors, repeats) for name, way in ways.items()}, rounds=rounds
    )
    calls = repeats * TENSORS
    found = {
        name: Timing(t.median_s / calls, t.low_s / calls, t.high_s / calls)
        for name, t in warm.items()
    }
    evicted = torch.zeros(EVICTED_BYTES // 4)
    cold: dict[str, list[float]] = {name: [] for name in (*ways, "begin")}
    for _ in range(cold_rounds):
        for name, way in ways.items():
            begin_s, calls_s = _cold_step(way, tensors, evicted)
            cold[name].append(calls_s / TENSORS)
            if name == "swap":
                cold["begin"].append(begin_s)
    return found | {f"cold {name}": timing_of(seconds) for name, seconds in cold.items()}


def floors(rounds: int) -> dict[str, Timing]:
    """Seconds per tensor of hooks that do nearly nothing, with cold caches: no engine is faster.

    The last ones are parts of an engine, which it may take or leave.

    Args:
        rounds: counted steps.
    """
    ways = {
        "an identity hook": Way(_nothing, lambda x, _: x, lambda x: x),  # type: ignore[arg-type, return-value]
        "one detach out, one back": Way(_nothing, lambda x, _: x.detach(), torch.Tensor.detach),  # type: ignore[arg-type]
        "save_on_cpu, its copies included": of_save_on_cpu(),
        **_parts(),
    }
    tensors = [torch.relu(torch.randn(NUMEL)) for _ in range(TENSORS)]
    evicted = torch.zeros(EVICTED_BYTES // 4)
    cold: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            _, calls_s = _cold_step(way, tensors, evicted)
            cold[name].append(calls_s / TENSORS)
    return {name: timing_of(seconds) for name, seconds in cold.items()}


def _parts() -> dict[str, Way]:
    sizes, cpu, nothing = torch.Size([NUMEL]), torch.device("cpu"), torch.empty(0)

    def counter(x: Tensor) -> object:
        found = x.detach()
        found.data = nothing
        return found

    def empty(_: object) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device="cpu")

    def empty_strided(_: object) -> Tensor:
        return torch.empty_strided(sizes, (1,), dtype=torch.float32, device=cpu)

    return {
        "torch.empty back": Way(_nothing, lambda *_: None, empty),
        "torch.empty_strided back": Way(_nothing, lambda *_: None, empty_strided),
        "a tensor that counts versions out": Way(_nothing, lambda x, _: counter(x), lambda x: x),  # type: ignore[arg-type, return-value]
    }


def _nothing() -> None:
    pass


def swap(codec: str) -> Way:
    """An engine's, by one codec."""
    engine = SwapEngine(SwapConfig(workers=0, codec=codec, min_bytes=0))

    def begin() -> None:
        engine.begin_step()
        engine.review_slots()  # as at each call of a model

    return Way(begin, lambda x, _: engine.pack(x), engine.unpack)  # type: ignore[arg-type]


def of_save_on_cpu() -> Way:
    """That of torch's own hooks, which copy to the host."""
    plain = save_on_cpu(PINS)
    return Way(_nothing, lambda x, _: plain.pack_hook(x), plain.unpack_hook)


def kernels(name: str, n_tensors: int) -> Way:
    """A codec's functions, as a program without an engine would call them.

    Args:
        name: of the codec.
        n_tensors: of a step.
    """
    codec = get_codec(name)
    out = torch.empty(codec.bound(torch.float32, NUMEL), dtype=torch.uint8)
    hosts = [torch.empty_like(out) for _ in range(n_tensors)]

    def encode(x: Tensor, n: int) -> Tensor:
        if codec.verbatim:
            copy_bytes(hosts[n], x, x.nbytes)
            return hosts[n]
        size = codec.encode_flat(x, out, key=DEFAULT_KEY, stream=None)
        assert isinstance(size, int)  # a CPU knows it at once
        copy_bytes(hosts[n], out, size)
        return hosts[n][:size]

    def decode(payload: object) -> Tensor:
        assert isinstance(payload, torch.Tensor)
        result = torch.empty(NUMEL)
        codec.decode_flat(payload, result, stream=None)
        return result

    return Way(_nothing, encode, decode)


def by_address(name: str, n_tensors: int) -> Way:
    """A codec's kernels alone, as the engine calls them; as `kernels`, if not by address."""
    codec, nbytes = get_codec(name), NUMEL * torch.float32.itemsize
    way = codec.by_address(torch.float32, nbytes, 1)
    if way is None:
        return kernels(name, n_tensors)
    scratch = torch.empty(way.bound, dtype=torch.uint8)
    hosts = [torch.empty(way.bound, dtype=torch.uint8) for _ in range(n_tensors)]

    def encode(x: Tensor, n: int) -> tuple[int, int]:
        host = hosts[n].data_ptr()
        size = way.encode(x.data_ptr(), scratch.data_ptr())
        ctypes.memmove(host, scratch.data_ptr(), size)
        return host, size

    def decode(payload: object) -> Tensor:
        address, size = cast("tuple[int, int]", payload)
        result = torch.empty(NUMEL)
        way.decode(address, size, result.data_ptr())
        return result

    return Way(_nothing, encode, decode)


def _steps(way: Way, tensors: list[Tensor], repeats: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeats):
            way.begin()
            packed = [way.out(x, n) for n, x in enumerate(tensors)]
            while packed:
                way.back(packed.pop())

    return run


def _cold_step(way: Way, tensors: list[Tensor], evicted: Tensor) -> tuple[float, float]:
    # Seconds of one step's begin, and of its calls.
    seconds, packed = 0.0, []
    evicted.add_(1)
    start = time.perf_counter()
    way.begin()
    begin_s = time.perf_counter() - start
    for n, x in enumerate(tensors):
        evicted.add_(1)
        start = time.perf_counter()
        packed.append(way.out(x, n))
        seconds += time.perf_counter() - start
    while packed:
        evicted.add_(1)
        start = time.perf_counter()
        way.back(packed.pop())
        seconds += time.perf_counter() - start
    return begin_s, seconds
