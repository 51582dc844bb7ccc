"""A process that trains one model in one way, a step whenever it is told to."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

import cswap
from bench.alone.memory import fresh_pages, own_bytes, peak_own_bytes
from bench.fit.models import WithLoss
from bench.workloads.methods import METHODS
from bench.workloads.tasks import make_task

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

OFF: Final = "off"
CHECKPOINT: Final = "checkpoint"
SAVE_ON_CPU: Final = "save_on_cpu"
CSWAP: Final = "cswap lossless"
LEFT_ALONE: Final = "cswap lossless, malloc left alone"
INT8: Final = "cswap int8"

WAYS: Final[dict[str, dict[str, Any] | None]] = {
    OFF: None,
    CHECKPOINT: None,
    SAVE_ON_CPU: None,
    CSWAP: {},
    LEFT_ALONE: {},
    INT8: {"lossy": "int8"},
}
"""Options of `cswap.install`; None: without cswap."""

A_WISH: Final = ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
"""Makes cswap leave malloc alone; the value is glibc's default, and this process has begun."""

SEED: Final = 0
STEPS_TO_LOAD: Final = 6
"""Steps that load all that cswap's first step would load: Numba, LLVM, kernels."""

STEPS_WATCHED: Final = 3
"""Steps in which the process's size is sampled; they are not timed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step.

    Attributes:
        seconds: of forward, backward and optimizer.
        pages: fresh pages that it took; None where the system does not say.
        loss: the loss, before the step.
    """

    seconds: float
    pages: int | None
    loss: float


@dataclass(frozen=True, slots=True)
class Order:
    """What a trainer is to train.

    Attributes:
        model: name of the task.
        way: one of WAYS.
        quick: small model.
        threads: of torch.
    """

    model: str
    way: str
    quick: bool
    threads: int


class Trainer:
    """A model in one way."""

    def __init__(self, order: Order) -> None:
        self._task = task = make_task(order.model, quick=order.quick, n_steps=None)
        torch.manual_seed(SEED)
        self._model = WithLoss(task.build())
        if order.way == CHECKPOINT:
            self._model.checkpoint(self._model.blocks)
        self._optimizer = task.optimizer(self._model.net)
        options = WAYS[order.way]
        if options is not None:
            cswap.install(self._model, **options)
        around = {method.name: method.around for method in METHODS}
        self._around = around.get(order.way, METHODS[0].around)
        self._before_bytes = own_bytes()
        self._n_steps = 0

    def step(self, number: int) -> Step:
        """Train one step; its number decides on the batch and on dropout."""
        self._n_steps = number + 1
        batch = self._task.batch(SEED, number)
        torch.manual_seed(number)
        pages, start_s = fresh_pages(), time.perf_counter()
        self._optimizer.zero_grad()
        with self._around(False):
            loss = self._model(*batch)
        loss.backward()
        self._optimizer.step()
        seconds, after = time.perf_counter() - start_s, fresh_pages()
        taken = None if after is None or pages is None else after - pages
        return Step(seconds, taken, float(loss.detach()))

    def growth(self) -> int | None:
        """Bytes by which the process is larger than before its first step, at its peak."""
        peak = peak_own_bytes(self._go_on)
        return None if peak is None or self._before_bytes is None else peak - self._before_bytes

    def _go_on(self) -> None:
        for _ in range(STEPS_WATCHED):
            self.step(self._n_steps)


def serve(pipe: Connection, order: Order) -> None:
    """Answer each number of a step with a `Step`; None with the growth, which ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    torch.set_num_threads(order.threads)
    name, value = A_WISH
    os.environ[name] = value
    _load()
    if order.way != LEFT_ALONE:
        del os.environ[name]
    trainer = Trainer(order)
    while (number := pipe.recv()) is not None:
        pipe.send(trainer.step(number))
    pipe.send(trainer.growth())


def _load() -> None:
    # In every way, so that the growth of a process is that of its training.
    for options in ({}, WAYS[INT8]):
        task = make_task("gpt", quick=True, n_steps=None)
        model = WithLoss(task.build())
        with cswap.install(model, min_bytes=1 << 10, **(options or {})):
            for step in range(STEPS_TO_LOAD):
                model(*task.batch(SEED, step)).backward()
