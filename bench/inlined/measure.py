"""One compiled model in every way; steps in turns, from the same weights on the same batches."""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.nn import functional

import cswap
from bench.workloads.turns import of_like_steps, turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from cswap.experiments.task import Task

PLAIN: Final = "plain"
WAYS: Final[dict[str, Callable[[], AbstractContextManager[Any]]]] = {
    PLAIN: nullcontext,
    "inlined, masks alone": cswap.inlined,
    "inlined bf16": lambda: cswap.inlined("bf16"),
    "inlined int8": lambda: cswap.inlined("int8"),
}
SWAPPED: Final = "hooks between graphs, int8"
"""The way of `cswap.install`, which counts its held bytes itself."""

N_SETTLING: Final = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one way.

    Attributes:
        model: name of its task.
        way: one of WAYS, or SWAPPED.
        saved_bytes: that the graphs of forward hold for backward: the storages of the tensors that
            autograd's nodes of compiled graphs name, parameters left out, each once; with SWAPPED,
            by cswap's count.
        saved_of_plain: the same over plain's.
        step_s: median time of forward and backward.
        time_of_plain: median of the quotients of like steps.
        time_of_plain_spread: their quartiles.
        gradient_error: largest relative error of a parameter's gradient, by its norm.
    """

    model: str
    way: str
    saved_bytes: int
    saved_of_plain: float
    step_s: float
    time_of_plain: float
    time_of_plain_spread: tuple[float, float]
    gradient_error: float


class Replica:
    """The task's model, compiled, in one way."""

    def __init__(self, task: Task, way: str) -> None:
        torch.manual_seed(0)
        self.net: nn.Module = task.build().eval()  # dropout would draw other masks in each way
        self.model: nn.Module = cast("nn.Module", torch.compile(self.net))
        self.way, self.step_s, self.saved = way, list[float](), 0
        self.around = WAYS.get(way, nullcontext)
        self.handle = cswap.install(self.model, lossy="int8") if way == SWAPPED else None

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Forward and backward; gradients stay."""
        inputs, targets = batch
        self.net.zero_grad()
        start = time.perf_counter()
        with self.around():
            logits = self.model(inputs)
        loss = functional.cross_entropy(logits, targets)
        self.saved = self._saved(logits)
        loss.backward()
        self.step_s.append(time.perf_counter() - start)

    def _saved(self, logits: Tensor) -> int:
        if self.handle is not None:
            return int(self.handle.stats.device_bytes + self.handle.stats.host_bytes)
        owned = {p.untyped_storage().data_ptr() for p in self.net.parameters()}
        found: dict[int, int] = {}
        nodes, seen = [logits.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            for x in getattr(node, "saved_tensors", ()) if "Compiled" in node.name() else ():
                storage = x.untyped_storage()
                if storage.data_ptr() not in owned:
                    found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())

    def error(self, plain: Replica) -> float:
        """Largest relative error of a gradient against plain's."""
        pairs = zip(self.net.parameters(), plain.net.parameters(), strict=True)
        return max(
            float((a.grad - b.grad).norm() / b.grad.norm())
            for a, b in pairs
            if a.grad is not None and b.grad is not None and b.grad.any()
        )

    def close(self) -> None:
        """Take cswap off."""
        if self.handle is not None:
            self.handle.remove()


def measure(task: Task, n_steps: int, on_step: Callable[[], object]) -> list[dict[str, Any]]:
    """Rows of one task, as JSON-able values."""
    replicas = [Replica(task, way) for way in (*WAYS, SWAPPED)]
    errors = dict.fromkeys((replica.way for replica in replicas), 0.0)
    try:
        for number in range(N_SETTLING + n_steps):
            batch = task.batch(0, number)
            for replica in turns(replicas, number):
                replica.step(batch)
            for replica in replicas:
                errors[replica.way] = max(errors[replica.way], replica.error(replicas[0]))
            on_step()
    finally:
        for replica in replicas:
            replica.close()
        torch._dynamo.reset()  # noqa: SLF001
    return [asdict(_row(task.name, r, replicas[0], errors[r.way])) for r in replicas]


def _row(model: str, replica: Replica, plain: Replica, error: float) -> Row:
    mine, its = (r.step_s[N_SETTLING:] for r in (replica, plain))
    time_of_plain, spread = of_like_steps(mine, its)
    return Row(
        model=model,
        way=replica.way,
        saved_bytes=replica.saved,
        saved_of_plain=replica.saved / plain.saved,
        step_s=statistics.median(mine),
        time_of_plain=time_of_plain,
        time_of_plain_spread=spread or (time_of_plain, time_of_plain),
        gradient_error=error,
    )
