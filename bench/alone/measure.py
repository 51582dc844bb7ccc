"""One model in every way, each in a process of its own; steps in turns."""

from __future__ import annotations

import multiprocessing
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bench.alone.trainer import OFF, WAYS, Order, Step, serve
from bench.workloads.turns import turns
from cswap.errors import CswapError
from cswap.experiments.timing import Timing, timing_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

SETTLING: Final = 20
"""Steps before the counted ones: cswap tries codecs in them, and malloc's limits adapt."""

END_S: Final = 30.0
"""How long a process may take to end."""


class EndedError(CswapError):
    """A process that trains has ended before its time."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one way.

    Attributes:
        model: name of its task.
        way: of `bench.alone.trainer.WAYS`.
        step: seconds of a step.
        time_of_off: median of the quotients of like steps.
        time_of_off_spread: their quartiles.
        pages: median of the fresh pages of a step; None where the system does not say.
        growth_bytes: own memory of the process at its peak in settled steps, over that before the
            first step.
        same_losses: whether all losses had the bits of off's.
    """

    model: str
    way: str
    step: Timing
    time_of_off: float
    time_of_off_spread: tuple[float, float]
    pages: float | None
    growth_bytes: int | None
    same_losses: bool


@dataclass(slots=True)
class _Running:
    # A process that trains in one way.
    order: Order
    steps: list[Step] = field(default_factory=list)
    growth_bytes: int | None = None
    _pipe: Connection = field(init=False)
    _process: SpawnProcess = field(init=False)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = theirs, self.order
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()  # the process's end alone is left, so that its death ends a wait

    def step(self, number: int, *, counted: bool) -> None:
        found = self._ask(number)
        if counted:
            self.steps.append(found)

    def end(self) -> None:
        self.growth_bytes = self._ask(None)
        self._process.join(END_S)

    def _ask(self, number: int | None) -> Any:
        try:
            self._pipe.send(number)
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            order = self.order
            raise EndedError(
                f"{order.model}, {order.way}: the process has ended. Its own message is above."
            ) from error

    def stop(self) -> None:
        self._pipe.close()
        self._process.kill()


def measure(
    model: str, *, rounds: int, settling: int, quick: bool, threads: int, on_step: Callable[[], Any]
) -> list[dict[str, Any]]:
    """Rows of one model, as JSON-able values.

    Args:
        model: name of the task.
        rounds: counted steps of each way.
        settling: steps before them.
        quick: small model.
        threads: of torch, in each process; the other processes wait meanwhile.
        on_step: called after every counted round.

    Raises:
        EndedError: a process has ended before its time.
    """
    with ExitStack() as stack:
        running = []
        for way in WAYS:
            one = _Running(Order(model, way, quick, threads))
            stack.callback(one.stop)
            running.append(one)
        for number in range(settling + rounds):
            for one in turns(running, number):
                one.step(number, counted=number >= settling)
            if number >= settling:
                on_step()
        for one in running:
            one.end()
    off = next(one for one in running if one.order.way == OFF)
    return [asdict(_row(one, off.steps)) for one in running]


def _row(one: _Running, off: list[Step]) -> Row:
    pairs = list(zip(one.steps, off, strict=True))
    quotients = [mine.seconds / its.seconds for mine, its in pairs]
    cuts = statistics.quantiles(quotients, n=4)
    pages = [step.pages for step in one.steps if step.pages is not None]
    return Row(
        model=one.order.model,
        way=one.order.way,
        step=timing_of([step.seconds for step in one.steps]),
        time_of_off=statistics.median(quotients),
        time_of_off_spread=(cuts[0], cuts[2]),
        pages=statistics.median(pages) if pages else None,
        growth_bytes=one.growth_bytes,
        same_losses=all(mine.loss == its.loss for mine, its in pairs),
    )
