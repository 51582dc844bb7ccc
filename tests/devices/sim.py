"""An adversarial stream simulator: a device for tests that does everything the contract allows.

Jobs do not run when they are submitted but in a random order that respects events and nothing
else (see Note [order on a device] in base.py); callbacks come late and in any order; memory is
poisoned when it is handed out and as soon as nobody refers to it. So a dependency that the executor
forgot, or memory that it let go too early, is wrong data under some seed, on a machine without GPU.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from cswap.devices.base import Event, LinkDevice, Role
from cswap.errors import InternalError, without_frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.codecs.base import Stream

    Job = Callable[[Stream], None]

POISON: Final = 0xA5


@dataclass(frozen=True, slots=True)
class SimStream:
    """A stream of the simulator: codecs run on it with one thread."""

    threads: int = 1


@dataclass(slots=True, eq=False)
class SimEvent:
    """Fires when the scheduler has run its job; settles when the callbacks have run, too."""

    job: Job | None
    after: tuple[Event, ...]
    role: Role
    error: BaseException | None = None
    elapsed_s: float = 0.0
    span_s: tuple[float, float] = (0.0, 0.0)
    fired: bool = False
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    measured: bool = False

    def query(self) -> bool:
        """See `Event.query`."""
        return self.fired

    def runnable(self) -> bool:
        """Whether everything that it waits for has fired."""
        return not self.fired and all(e.query() for e in self.after)


class SimDevice(LinkDevice):
    """Runs jobs in any order that the contract allows, one choice after the other by seed.

    Not thread-safe: an engine on it must not be visited by the thread that releases handles.
    """

    backlog_bytes = 1 << 40
    ready_bytes = 1 << 30

    def __init__(
        self,
        seed: int,
        *,
        eager: bool = False,
        kind: str = "cpu",
        section_bytes: int | None = None,
    ) -> None:
        """Simulate under one seed.

        Args:
            seed: of all choices.
            eager: computation is real (torch's own, which has run when it returns) rather than
                submitted as jobs of role "compute": then `join` runs the jobs that it waits for.
            kind: of tensors that the engine gives to this device.
            section_bytes: see `Device`.
        """
        self.section_bytes = section_bytes
        self.kind = kind
        self._random = random.Random(seed)
        self._eager = eager
        self._jobs: list[SimEvent] = []
        self._callbacks: list[Callable[[], None]] = []
        self._joined: tuple[Event, ...] = ()

    def submit(
        self, job: Job, *, role: Role, after: tuple[Event, ...] = (), measure: bool = False
    ) -> Event:
        """See `LinkDevice.submit`. Computation is in order, as on any compute stream."""
        if role == "compute" and not self._eager:
            earlier = tuple(e for e in self._jobs if e.role == "compute")
            after = (*after, *self._joined, *earlier)
        event = SimEvent(job, after, role)
        self._jobs.append(event)
        return event

    def when(self, event: Event, callback: Callable[[], None]) -> None:
        """See `LinkDevice.when`."""
        own = _own(event)
        (self._callbacks if own.fired else own.callbacks).append(callback)

    def wait(self, event: Event) -> None:
        """See `LinkDevice.wait`: runs other things, too, and in any order."""
        own = _own(event)
        pending = [False]
        own.callbacks.append(lambda: pending.__setitem__(0, True))
        if own.fired:
            self._callbacks.extend(own.callbacks)
            own.callbacks.clear()
        while not pending[0] or self._callbacks:
            self.step()

    def now(self) -> Event:
        """See `Device.now`."""
        waits = () if self._eager else tuple(e for e in self._jobs if e.role == "compute")
        return self.submit(lambda _: None, role="codec", after=waits)

    def join(self, event: Event, at: Event | None = None) -> None:
        """See `Device.join`."""
        if self._eager:
            self.wait(event)
        else:
            self._joined = (*self._joined, event)

    def allocate(
        self, sizes: tuple[int, ...], strides: tuple[int, ...], *, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `Device.allocate`."""
        return poisoned(prod(sizes) * dtype.itemsize).view(dtype).as_strided(sizes, strides)

    def scratch(self, nbytes: int, role: Role) -> torch.Tensor:
        """See `Device.scratch`."""
        return poisoned(nbytes)

    def give_back(self, scratch: torch.Tensor, after: Event | None = None) -> None:
        """See `Device.give_back`: whoever uses it after that reads poison."""
        if after is None:
            scratch.fill_(POISON)
        else:
            self.when(after, lambda: _poison(scratch))

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """See `Device.host_memory`."""
        return poisoned(nbytes)

    def step(self) -> None:
        """Run one job or one callback, at random among those that may run.

        Raises:
            InternalError: something is waited for that can never happen.
        """
        ready = [e for e in self._jobs if e.runnable()]
        choice = self._random.randrange(len(ready) + len(self._callbacks) or 1)
        if choice < len(ready):
            self._run(ready[choice])
        elif self._callbacks:
            self._callbacks.pop(choice - len(ready))()
        else:
            raise InternalError("simulator: a job waits for an event that cannot fire")

    def drain(self) -> None:
        """Run everything that can run."""
        while self._callbacks or any(e.runnable() for e in self._jobs):
            self.step()

    def _run(self, event: SimEvent) -> None:
        job, event.job = event.job, None
        try:
            if job is not None:
                job(SimStream())
        except Exception as error:
            event.error = without_frames(error)
        del job
        event.fired = True
        self._jobs.remove(event)
        self._callbacks.extend(event.callbacks)
        event.callbacks.clear()


def _poison(memory: torch.Tensor) -> None:
    memory.fill_(POISON)


def poisoned(nbytes: int) -> torch.Tensor:
    """[nbytes] uint8, poisoned now, and again once the last reference to its storage is gone."""
    memory = np.full(nbytes, POISON, np.uint8)
    handed_out = memory[:]  # torch refers to this object, we to the memory behind it
    weakref.finalize(handed_out, memory.fill, POISON)
    return torch.from_numpy(handed_out)


def _own(event: Event) -> SimEvent:
    if not isinstance(event, SimEvent):
        raise InternalError(f"event {event!r} is not of this device")
    return event
