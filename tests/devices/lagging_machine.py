"""`LaggingMachine`: engines on the stand-in for a GPU that runs only when it is let."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bench.twin.lagging_cuda import LaggingCuda
from bench.twin.lagging_device import installed, watched
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.engine.sender import Sender

if TYPE_CHECKING:
    from bench.twin.lagging_cuda import LaggingStream


class LaggingMachine:
    """A stand-in, its device, and engines that run on it.

    Attributes:
        cuda: stands for `torch.cuda`; its ``faults`` name memory that was used too early.
        device: a `CudaDevice` that runs on it.
        same: whether a tensor that has come back is the one that was saved.
    """

    same = staticmethod(torch.equal)

    def __init__(self, patch: Any, seed: int = 0) -> None:
        """Args: patch: pytest's monkeypatch; seed: of the order in which streams run."""
        self.cuda = LaggingCuda(seed)
        self.device: Any = next(installed(self.cuda, patch))
        self._patch = patch

    def engine(self, codec: str, **options: Any) -> SwapEngine:
        """An engine of this device. Args: options: ``plan``, and those of `SwapConfig`."""
        plan = options.pop("plan", None)
        config = SwapConfig(codec=codec, min_bytes=0, **options)
        engine = SwapEngine(config, plan, device=self.device)
        choose, known = Sender._choose, {}  # one for each codec, as there is one of each codec

        def chosen(packer: Any, handle: Any, x: torch.Tensor, **options: Any) -> Any:
            codec = choose(packer, handle, x, **options)
            if codec not in known:
                known[codec] = watched(self.cuda, codec)
            return known[codec]

        self._patch.setattr(Sender, "_choose", chosen)
        return engine

    def tensor(self, numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[numel] of the compute stream, with zeros."""
        generator = torch.Generator().manual_seed(seed)
        x = self.cuda.empty(numel, dtype=dtype, device="cuda")
        x.copy_(torch.randn(numel, generator=generator).relu_())
        self.cuda.touch(x, writes=True, text="the operator")
        return x

    def use(self, x: torch.Tensor) -> None:
        """An operator of the current stream reads it."""
        self.cuda.touch(x, writes=False, text="an operator")

    def drop_in_take(self, engine: SwapEngine, packed: list[Any]) -> None:
        """Let these packed objects die when memory of the host is next taken, as if in a thread."""
        lane: Any = engine._state.lanes._only
        take = lane.host.take

        def dies(nbytes: int) -> Any:
            packed.clear()
            engine.collect()
            return take(nbytes)

        self._patch.setattr(lane.host, "take", dies)

    def save(self, engine: SwapEngine, n: int, numel: int) -> tuple[list[Any], list[torch.Tensor]]:
        """Packed objects of n tensors that nobody else holds, and their values."""
        packed, values = [], []
        for i in range(n):
            x = self.tensor(numel, i)
            values.append(x.clone())
            packed.append(engine.pack(x))
            del x
        return packed, values

    def ask(
        self, engine: SwapEngine, packed: Any, value: torch.Tensor, other: LaggingStream | None
    ) -> None:
        """Ask for a tensor and use it; nothing happens if it was modified since it was saved.

        Args:
            engine: that packed it.
            packed: the packed object.
            value: that the tensor must have.
            other: the stream that asks; None: the compute stream. As autograd does it, the stream
                waits for the compute stream, and that waits for the use.

        Raises:
            AssertionError: the tensor has another value.
        """
        if other is not None:
            other.wait_event(self.device.now().event)
        with self.cuda.stream(self.cuda.default if other is None else other):
            try:
                back = engine.unpack(packed)
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                return
            self.use(back)
            assert self.same(back, value)
            del back
        if other is not None:
            ended = self.cuda.Event()
            ended.record(other)
            self.cuda.default.wait_event(ended)
