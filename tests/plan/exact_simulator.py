"""A second simulator, slow and exact, with a different structure, to check the fast one.

Times are fractions, so nothing is rounded. Every tensor is an object that knows the place of its
bytes. Memory is summed anew for every query. Decisions read the tensors' states instead of queues
of indices. It shares no code with the simulator's inner loop but the lifetimes. The docstring of
`cswap.plan.simulator.events` defines the meaning of a plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from cswap.errors import InternalError
from cswap.plan.simulator.lifetimes import Lifetimes, lifetimes
from tests.plan.exact_records import Item, Job, Replayed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.plan.hardware import Hardware
    from cswap.schema.trace import Trace


CAUSES: Final = ("swap_in", "swap_out", "memory", "codec", "recompute")


@dataclass(slots=True)
class Replay:
    """One run of one candidate.

    Attributes:
        trace: the step.
        hardware: the machine.
        budget_bytes: device memory budget.
        action: action by position, as for `Simulator.run`.
        codec: name of the codec by position.
        prefetch: operator index by position.
        drain: whether operators and swap-ins wait for all swap-outs.
    """

    trace: Trace
    hardware: Hardware
    budget_bytes: int
    action: Sequence[int]
    codec: Sequence[str]
    prefetch: Sequence[int]
    drain: bool = False
    _tensors: list[Item] = field(default_factory=list)
    _jobs: dict[str, Job] = field(default_factory=dict)
    _lines: dict[str, list[Item]] = field(default_factory=dict)
    _chain: list[int] = field(default_factory=list)
    _workspace: int = 0
    _made: int = 0  # bytes of outputs of the operator that runs
    _next: int = 0
    _started: int = -1
    _encoding: bool = False
    _feasible: bool = True
    _peak: int = 0
    _host_peak: int = 0
    _link: int = 0
    _exposed: dict[str, Fraction] = field(default_factory=dict)
    _life: Lifetimes = field(init=False)
    _leaver: Item | None = None  # the tensor of the D2H copy

    def run(self) -> Replayed:
        """Replay the step."""
        self._prepare()
        now = area = Fraction(0)
        while self._next < len(self.trace.operators):
            self._start(forced=False)
            if not self._jobs:
                self._start(forced=True)
            if not self._jobs:
                raise InternalError(f"replay: stuck at operator {self._next}.")
            speed = {name: self._speed(name) for name in self._jobs}
            passed = min(job.left_s / speed[name] for name, job in self._jobs.items())
            area += passed * self._device_bytes()
            self._account(passed)
            now += passed
            for name, job in self._jobs.items():
                job.left_s -= passed * speed[name]
            for name in ("compute", "codec", "d2h", "h2d"):
                if name in self._jobs and self._jobs[name].left_s == 0:
                    self._jobs.pop(name).end()
        average = area / now if now else Fraction(0)
        return Replayed(
            now, self._peak, self._host_peak, average, self._link, self._feasible, self._exposed
        )

    def _prepare(self) -> None:
        self._life = life = lifetimes(self.trace)
        place = {t: p for p, t in enumerate(life.swappable)}
        for index, tensor in enumerate(self.trace.tensors):
            p = place.get(index)
            action = "keep" if p is None else ("keep", "swap", "recompute")[self.action[p]]
            codec = "raw" if p is None else self.codec[p]
            if self.hardware.unified and (action, codec) == ("swap", "raw"):
                action = "keep"
            ratio = 1.0 if codec == "raw" else tensor.ratios.get(codec, 1.0)
            encoded = max(1, math.ceil(tensor.nbytes / ratio))
            first, last = life.forward[index] + 1, life.backward[index]
            start = 0 if p is None else min(max(self.prefetch[p], first), last)
            rank = (last, -1 if p is None else p)
            record = Item(index, tensor.nbytes, encoded, action, codec == "raw", start, last, rank)
            if life.producer[index] < 0:
                record.at, record.copies = "device", tensor.nbytes
            self._tensors.append(record)
        self._lines = {"decode": [], "encode": [], "d2h": []}
        self._exposed = dict.fromkeys(CAUSES, Fraction(0))
        self._look()

    def _device_bytes(self) -> int:
        held = sum(tensor.copies + tensor.scratch for tensor in self._tensors)
        return self.trace.resident_bytes + held + self._workspace + self._made

    def _host_bytes(self) -> int:
        copied = (t for t in self._tensors if t.at in ("host", "coming") or t is self._leaver)
        return sum(t.encoded for t in copied)

    def _look(self) -> None:
        """Update peaks and check budgets after memory was taken."""
        device, host = self._device_bytes(), self._host_bytes()
        self._peak, self._host_peak = max(self._peak, device), max(self._host_peak, host)
        limit = self.hardware.host_memory_bytes
        if device > self.budget_bytes or (limit and host > limit):
            self._feasible = False

    def _needs(self, index: int) -> tuple[int, int]:
        """Bytes of an operator's outputs, and of its workspace."""
        operator = self.trace.operators[index]
        return sum(self._tensors[t].nbytes for t in operator.outputs), operator.workspace_bytes

    def _room(self, nbytes: int) -> bool:
        return self._device_bytes() + nbytes <= self.budget_bytes

    def _start(self, *, forced: bool) -> None:
        """Start all jobs that can start; forced: start the first job that lacks only room."""
        self._stay()
        free = (self._start_codec, self._start_d2h, self._start_compute, self._start_h2d)
        for start in (free[0], free[3], free[2]) if forced else free:
            if not (forced and self._jobs):
                start(forced)

    def _stay(self) -> None:
        """Keep the raw tensors on their way out that the operator that runs next reads."""
        if "compute" in self._jobs or self.drain:
            return
        for t in self.trace.operators[self._waiting()].inputs:
            tensor = self._tensors[t]
            if tensor.at == "leaving":
                tensor.at, tensor.fetched = "device", True
                for line in self._lines.values():
                    if tensor in line:
                        line.remove(tensor)

    def _start_codec(self, forced: bool) -> None:
        if "codec" in self._jobs:
            return
        if self._lines["decode"]:
            tensor = self._lines["decode"].pop(0)
            self._encoding = False
            self._jobs["codec"] = Job(self._codec_s(tensor, "decode"), self._decoded(tensor))
        elif self._lines["encode"] and (forced or self._room(self._lines["encode"][0].encoded)):
            tensor = self._lines["encode"].pop(0)
            tensor.scratch = tensor.encoded
            self._encoding = True
            self._jobs["codec"] = Job(self._codec_s(tensor, "encode"), self._encoded(tensor))
            self._look()

    def _start_d2h(self, forced: bool) -> None:
        if "d2h" in self._jobs or not self._lines["d2h"]:
            return
        tensor = self._leaver = self._lines["d2h"].pop(0)
        seconds = self._copy_s(tensor, self.hardware.d2h_bytes_per_s)
        self._jobs["d2h"] = Job(seconds, self._left(tensor))
        self._look()

    def _start_compute(self, forced: bool) -> None:
        if "compute" in self._jobs:
            return
        if self._waits_for_swap_outs():
            return
        index = self._waiting()
        made, workspace = self._needs(index)
        if self._missing(index) is not None or not (forced or self._room(made + workspace)):
            return
        self._made, self._workspace = made, workspace
        if self._chain:
            end = self._ran_again(index)
        else:
            end, self._started = self._ran(index), index
        self._jobs["compute"] = Job(Fraction(self.trace.operators[index].duration_s), end)
        self._look()

    def _start_h2d(self, forced: bool) -> None:
        if "h2d" in self._jobs or self._waits_for_swap_outs():
            return
        reserve, wanted = 0, None
        if "compute" not in self._jobs:
            index = self._waiting()
            reserve = sum(self._needs(index))
            here = (self._tensors[t] for t in self.trace.operators[index].inputs)
            wanted = next((t for t in here if t.at == "host"), None)
        tensor = wanted or self._due()
        if tensor is None:
            return
        there = tensor.copies  # its encoding, where host memory is the device's own
        need = tensor.nbytes + (0 if tensor.raw else tensor.encoded) - there
        if not (self._room(need + (0 if wanted else reserve)) or (forced and wanted)):
            return
        tensor.at, tensor.fetched, tensor.copies = "coming", True, there + need
        seconds = self._copy_s(tensor, self.hardware.h2d_bytes_per_s)
        self._jobs["h2d"] = Job(seconds, self._came(tensor))
        self._look()

    def _waits_for_swap_outs(self) -> bool:
        leaving = self._lines["encode"] or self._lines["d2h"] or "d2h" in self._jobs
        return self.drain and bool(leaving or ("codec" in self._jobs and self._encoding))

    def _due(self) -> Item | None:
        """The next swap-in in the order of backward uses, if it may start now."""
        pending = (t for t in self._tensors if t.action == "swap" and not t.fetched)
        for tensor in sorted(pending, key=lambda t: t.rank):
            if tensor.prefetch > self._started:
                return None
            if tensor.at != "leaving" or self.drain:
                return tensor if tensor.at == "host" else None
        return None

    def _codec_s(self, tensor: Item, what: str) -> Fraction:
        place = next(p for p, t in enumerate(self._life.swappable) if t == tensor.index)
        rate = self.hardware.codecs[self.codec[place]]
        bytes_per_s = rate.encode_bytes_per_s if what == "encode" else rate.decode_bytes_per_s
        return Fraction(rate.overhead_s) + tensor.nbytes / Fraction(bytes_per_s)

    def _copy_s(self, tensor: Item, bytes_per_s: float) -> Fraction:
        if self.hardware.unified:
            return Fraction(0)
        return Fraction(self.hardware.link_latency_s) + tensor.encoded / Fraction(bytes_per_s)

    def _copied(self, tensor: Item) -> int:
        return 0 if self.hardware.unified else tensor.encoded

    def _speed(self, resource: str) -> Fraction:
        if resource == "compute" and "codec" in self._jobs:
            return 1 - Fraction(self.hardware.codec_tax)
        if resource in ("d2h", "h2d") and {"d2h", "h2d"} <= set(self._jobs):
            return Fraction(self.hardware.duplex_factor)
        return Fraction(1)

    def _encoded(self, tensor: Item) -> Callable[[], None]:
        def end() -> None:
            tensor.scratch = 0
            if tensor.at == "leaving":
                tensor.at, tensor.copies = "sent", tensor.encoded
                self._lines["d2h"].append(tensor)

        return end

    def _left(self, tensor: Item) -> Callable[[], None]:
        def end() -> None:
            if tensor.at in ("leaving", "sent"):
                tensor.copies, tensor.at = (tensor.encoded if self.hardware.unified else 0), "host"
            self._leaver, self._link = None, self._link + self._copied(tensor)

        return end

    def _came(self, tensor: Item) -> Callable[[], None]:
        def end() -> None:
            tensor.at = "device" if tensor.raw else "decoding"
            self._link += self._copied(tensor)
            if not tensor.raw:
                self._lines["decode"].append(tensor)

        return end

    def _decoded(self, tensor: Item) -> Callable[[], None]:
        def end() -> None:
            tensor.copies, tensor.at = tensor.nbytes, "device"

        return end

    def _ran(self, index: int) -> Callable[[], None]:
        def end() -> None:
            for t in self.trace.operators[index].outputs:
                self._tensors[t].at, self._tensors[t].copies = "device", self._tensors[t].nbytes
            self._workspace = self._made = 0
            for tensor in self._tensors:
                if self._life.last_use[tensor.index] == index:
                    tensor.at, tensor.copies = "dead", 0
            for t in self._life.swappable:
                if self._life.forward[t] == index:
                    self._leave(self._tensors[t])
            self._next = index + 1
            if self._next < len(self.trace.operators):
                self._chain = self._ancestors(self._next)
                self._look()

        return end

    def _leave(self, tensor: Item) -> None:
        if tensor.action == "swap":
            tensor.at = "leaving"
            self._lines["d2h" if tensor.raw else "encode"].append(tensor)
        elif tensor.action == "recompute":
            tensor.at, tensor.copies = "dropped", 0

    def _ran_again(self, index: int) -> Callable[[], None]:
        def end() -> None:
            operator = self.trace.operators[index]
            self._workspace = self._made = 0
            for tensor in (self._tensors[t] for t in operator.outputs):
                if tensor.at == "dropped":
                    tensor.at, tensor.copies = "device", tensor.nbytes
                elif tensor.at == "dead" and tensor.uses_left:
                    tensor.at, tensor.copies = "again", tensor.nbytes
            for tensor in (self._tensors[t] for t in operator.inputs):
                if tensor.at == "again":
                    tensor.uses_left -= 1
                    if not tensor.uses_left:
                        tensor.at, tensor.copies = "dead", 0
            self._chain.pop(0)

        return end

    def _ancestors(self, index: int) -> list[int]:
        """Operators to run again before operator ``index``; counts the users of intermediates."""
        found: set[int] = set()

        def visit(reader: int) -> None:
            inputs = self.trace.operators[reader].inputs
            for t, maker in zip(inputs, self._life.makers[reader], strict=True):
                tensor = self._tensors[t]
                if tensor.at not in ("dropped", "dead"):
                    continue
                if maker < 0:
                    self._feasible = False
                    continue
                tensor.uses_left += tensor.at == "dead"
                if maker not in found:
                    found.add(maker)
                    visit(maker)

        visit(index)
        return sorted(found)

    def _waiting(self) -> int:
        """The operator that runs next: the first of the chain, or the next of the step."""
        return self._chain[0] if self._chain else self._next

    def _missing(self, index: int) -> Item | None:
        inputs = (self._tensors[t] for t in self.trace.operators[index].inputs)
        away = ("leaving", "sent", "host", "coming", "decoding")
        return next((tensor for tensor in inputs if tensor.at in away), None)

    def _account(self, passed: Fraction) -> None:
        if "compute" in self._jobs:
            speed = self._speed("compute")
            self._exposed["codec"] += passed * (1 - speed)
            if self._chain:
                self._exposed["recompute"] += passed * speed
            return
        self._exposed[self._cause()] += passed

    def _cause(self) -> str:
        missing = self._missing(self._waiting())
        if missing is None:
            causes = (("d2h", "swap_out"), ("codec", "codec"))
            return next((cause for job, cause in causes if job in self._jobs), "memory")
        if missing.at == "host":
            return "swap_in" if "h2d" in self._jobs else "memory"
        if missing.at in ("leaving", "sent"):
            return "swap_out"
        return "swap_in" if missing.at == "coming" else "codec"
