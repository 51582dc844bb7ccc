"""The simulator of many candidates for one trace, machine and budget. Candidates are arrays.

`events.py` defines the meaning of a plan. `tests/plan/exact_simulator.py` implements it again in
plain Python, slowly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from cswap.display import short, shown
from cswap.errors import ConfigError, InternalError
from cswap.plan.simulator import loop, state
from cswap.plan.simulator.lifetimes import chain, fingerprint, lifetimes
from cswap.plan.simulator.tables import build, codec_names
from cswap.schema.plan import Action, Decision, Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from cswap.plan.hardware import Hardware
    from cswap.plan.simulator.tables import Template
    from cswap.schema.trace import Trace

KEEP, SWAP, RECOMPUTE = 0, 1, 2
_NAMES: Final[tuple[Action, ...]] = ("keep", "swap", "recompute")

CAUSES: Final = ("swap_in", "swap_out", "memory", "codec", "recompute")
"""Causes for which computation waited or ran slower.

* swap_in: computation waited for the copy of a tensor that it reads.
* swap_out: it waited for room while a D2H copy ran, or for a swap-in that cannot begin before the
  tensor has left.
* codec: it waited for a decode or, while only the codec ran, for room; or it lost speed to the
  codec.
* memory: it waited for room for a swap-in, or for room in any other case.
* recompute: forward operators ran again.
"""


class RunResult(NamedTuple):
    """The simulated cost of one candidate.

    Attributes:
        step_s: end of the last operator.
        peak_bytes: maximum of device memory, resident bytes included.
        feasible: whether the device and host budgets hold all the time and no tensor is lost.
        over_bytes: largest excess over the device or host budget; 0 if feasible.
        average_bytes: mean of device memory over time.
        host_peak_bytes: maximum of host memory.
        link_bytes: bytes copied in both directions together.
        exposed_s: exposed seconds by cause, in the order of `CAUSES`.
        flaws: bits of `state`, such as OVER_DEVICE; 0 if feasible.
        first_over: operator that waited or ran when the device budget was first exceeded, or -1.
    """

    step_s: float
    peak_bytes: int
    feasible: bool
    over_bytes: int
    average_bytes: float
    host_peak_bytes: int
    link_bytes: int
    exposed_s: tuple[float, ...]
    flaws: int
    first_over: int


def predictions(figures: Mapping[str, Any], compute_s: float) -> dict[str, float]:
    """The figures that a plan stores as `Plan.predicted`.

    Args:
        figures: the fields of a `RunResult` or of a `Simulation`, which knows this file.
        compute_s: sum of the operators' durations.
    """
    names = ("step_s", "peak_bytes", "average_bytes", "host_peak_bytes", "link_bytes")
    stored = {name: figures[name] for name in names}
    return {"compute_s": compute_s, "feasible": float(figures["feasible"])} | stored


class Simulator:
    """Simulates candidates for one trace, machine and budget.

    Attributes:
        trace, hardware, budget_bytes: as given (budget None: all memory of the device).
        swappable: tensor index by position in the arrays: the swappable tensors in saved order.
        saved: key in a plan (`TraceTensor.saved`) by position in the arrays.
        codecs: names of codecs; index 0 is ``raw``.
        ratios: [n, codecs] raw bytes over encoded bytes; 1 where no ratio is known.
        nbytes: [n] raw bytes.
        forward, backward: [n] operator index f (last forward use) and b (first backward use).
        order: [n] positions in order of first backward use: the order of swap-ins.
        recomputable: [n] whether the trace has the operators to compute the tensor again.
        encoded_bytes, encode_s, decode_s, d2h_s, h2d_s: [n, codecs] bytes and seconds of one swap
            while nothing else runs.
        compute_s: sum of the operators' durations.
        worst_s: an upper bound of every feasible plan's step time (no overlap, slowest codec).
    """

    def __init__(
        self,
        trace: Trace,
        hardware: Hardware,
        budget_bytes: int | None = None,
    ) -> None:
        """Prepare the tables that all candidates share.

        Args:
            trace: the step.
            hardware: the machine.
            budget_bytes: device memory for the whole step; None: all memory of the device.
        """
        self.trace, self.hardware = trace, hardware
        self.budget_bytes = hardware.memory_bytes if budget_bytes is None else int(budget_bytes)
        self._life = life = lifetimes(trace)
        self._template = template = build(trace, hardware, life, self.budget_bytes)
        self._timeless = template.timeless()
        self.swappable = life.swappable
        self.saved = tuple(trace.tensors[t].saved for t in life.swappable)
        self.codecs = codec_names(hardware, trace)
        self.nbytes = np.array([trace.tensors[t].nbytes for t in life.swappable], np.int64)
        self.encoded_bytes = template.encoded
        self.ratios = self.nbytes[:, None] / template.encoded
        positions = template.tables.positions
        self.forward, self.backward = positions["forward"].copy(), positions["backward"].copy()
        self.order = positions["order"].copy()
        self.encode_s, self.decode_s = template.seconds[:, :, 0], template.seconds[:, :, 1]
        self.d2h_s, self.h2d_s = template.seconds[:, :, 2], template.seconds[:, :, 3]
        self.recomputable = np.array(
            [chain(trace, life, t) is not None for t in life.swappable], np.bool_
        )
        self.compute_s = sum(o.duration_s for o in trace.operators)
        self.worst_s = self._worst_s()
        self._rank = np.empty(len(self.order), np.int64)
        self._rank[self.order] = np.arange(len(self.order))

    def floor_bytes(self) -> int:
        """Smallest budget in which the step runs: swappable tensors leave and return on demand.

        On unified hardware a raw swap frees nothing. There it is the smallest budget of three
        plans: all tensors stay; all are encoded into the fewest bytes; all that can be are
        recomputed, and the others encoded.
        """
        count = len(self.saved)
        swap, codec = np.full(count, SWAP, np.int8), np.zeros(count, np.int8)
        actions = [swap]
        if self.hardware.unified:
            codec = self.encoded_bytes.argmin(axis=1).astype(np.int8)
            drop = np.where(self.recomputable, RECOMPUTE, SWAP).astype(np.int8)
            actions += [np.full(count, KEEP, np.int8), drop]
        runs = (self._run(self._timeless, action, codec, self.backward) for action in actions)
        return min(int(step["peak_bytes"].item()) for step in runs)

    def run(
        self, action: NDArray[np.int8], codec: NDArray[np.int8], prefetch: NDArray[np.int32]
    ) -> RunResult:
        """Simulate one candidate; safe to call from several threads.

        Args:
            action: [n] 0 keep, 1 swap, 2 recompute.
            codec: [n] index into `codecs`; read where action is 1.
            prefetch: [n] operator index p: the swap-in may start after the start of operator p.
                Values are clipped to f < p <= b. Read where action is 1.

        Raises:
            InternalError: an array has the wrong length or a codec index out of range.
        """
        return self._result(self._run(self._template, action, codec, prefetch))

    def earliest_prefetch(
        self, action: NDArray[np.int8], codec: NDArray[np.int8]
    ) -> NDArray[np.int32]:
        """[n] the earliest starts of swap-ins that memory allows, in order of backward uses.

        The free memory comes from a run in which copies and operators take no time and every
        swap-in starts on demand. Each prefetched tensor is then added to the memory in turn.
        """
        tables = self._timeless.tables._replace(peaks=np.zeros(len(self.trace.operators), np.int64))
        self._run(replace(self._timeless, tables=tables), action, codec, self.backward)
        template = replace(self._template, tables=tables)
        starts: NDArray[np.int32] = loop.earliest(*template.candidate(action, codec, self.backward))
        return starts

    def to_plan(
        self,
        action: NDArray[np.int8],
        codec: NDArray[np.int8],
        prefetch: NDArray[np.int32] | None = None,
        policy: str = "",
    ) -> Plan:
        """The plan of a candidate, with the figures of its simulation.

        A plan counts prefetches in saved tensors, not in operators. So a start moves to the next
        later first backward use of any saved tensor.

        Args:
            action: as for `run`.
            codec: as for `run`.
            prefetch: as for `run`; None: as early as memory allows.
            policy: name of the policy that made the candidate.
        """
        decisions = {}
        if self.hardware.unified:  # a raw swap frees nothing
            action = np.where((action == SWAP) & (codec == 0), KEEP, action)
        for p, saved in enumerate(self.saved):
            name, tensor = _NAMES[int(action[p])], self.trace.tensors[self.swappable[p]]
            module = self._module_of(self.swappable[p])
            made = Decision(name, module=module, nbytes=tensor.nbytes)
            if action[p] == SWAP:
                ahead = None if prefetch is None else self._ahead(p, int(prefetch[p]))
                made = replace(made, codec=self.codecs[int(codec[p])], prefetch=ahead)
            decisions[saved] = made
        plan = Plan(decisions, policy, self.budget_bytes, self.hardware.name)
        result = self.run(*self.from_plan(plan))
        predicted = predictions(result._asdict(), self.compute_s)
        return replace(plan, predicted=predicted, trace_fingerprint=fingerprint(self.trace))

    def _module_of(self, tensor: int) -> str:
        """Path of the smallest module with the producer and all forward users of a tensor."""
        life, operators = self._life, self.trace.operators
        touched = [u for u in life.users[tensor] if operators[u].phase == "forward"]
        if life.producer[tensor] >= 0:
            touched.append(life.producer[tensor])
        paths = [operators[u].module.split(".") for u in touched]
        common = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        return ".".join(common)

    def from_plan(self, plan: Plan) -> tuple[NDArray[np.int8], NDArray[np.int8], NDArray[np.int32]]:
        """The arrays action, codec and prefetch of a plan; `sections.py` treats sections.

        Raises:
            ConfigError: no swappable tensor has a position of the plan, or the hardware lacks a
                codec.
        """
        n = len(self.saved)
        action, codec = np.zeros(n, np.int8), np.zeros(n, np.int8)
        fixed = np.full(n, -1, np.int32)
        place = {saved: p for p, saved in enumerate(self.saved)}
        for saved, decision in plan.decisions.items():
            if saved not in place:
                raise ConfigError(
                    f"plan.decisions[{saved}]: the trace has no swappable tensor saved at {saved}."
                )
            p = place[saved]
            action[p] = _NAMES.index(decision.action)
            codec[p] = self._codec_index(saved, decision.codec or "raw")
            if decision.prefetch is not None:
                ahead = self.order[max(self._rank[p] - decision.prefetch, 0)]
                fixed[p] = self.backward[ahead]
        starts = fixed
        if (fixed < 0).any():
            starts = np.where(fixed < 0, self.earliest_prefetch(action, codec), fixed)
        return action, codec, starts.astype(np.int32)

    def _ahead(self, p: int, start: int) -> int:
        """Distance in saved tensors from operator ``start`` to the tensor's first backward use."""
        first = int(np.searchsorted(self.backward[self.order], start, side="left"))
        return max(int(self._rank[p]) - first, 0)

    def _codec_index(self, saved: int, name: str) -> int:
        if name not in self.codecs:
            raise ConfigError(
                f"plan.decisions[{saved}].codec={shown(name)}: hardware "
                f"{shown(self.hardware.name)} has no rates for it. "
                f"Known: {short(', '.join(self.codecs))}."
            )
        return self.codecs.index(name)

    def _worst_s(self) -> float:
        again_s = sum(o.duration_s for o in self.trace.operators if o.phase == "forward")
        computing_s = self.compute_s + again_s * len(self.saved)
        slowest_s = self._template.seconds.sum(axis=2).max(axis=1, initial=0.0).sum()
        moving_s = float(slowest_s) / self.hardware.duplex_factor
        return computing_s / (1.0 - self.hardware.codec_tax) + moving_s

    def _run(
        self,
        template: Template,
        action: NDArray[np.int8],
        codec: NDArray[np.int8],
        prefetch: NDArray[np.integer],
    ) -> NDArray[np.void]:
        """Run the inner loop from a template; return its state."""
        count = len(self.saved)
        if not action.size == codec.size == prefetch.size == count:
            raise InternalError(f"simulator: arrays must have {count} entries.")
        if count and not (codec.min() >= 0 and codec.max() < len(self.codecs)):
            raise InternalError(f"simulator: codec indices must be in 0..{len(self.codecs) - 1}.")
        step: NDArray[np.void] = loop.run(*template.candidate(action, codec, prefetch))
        if step["flaws"].item() & state.STUCK:
            raise InternalError(f"simulator: stuck at operator {step['operator'].item()}.")
        return step

    def _result(self, step: NDArray[np.void]) -> RunResult:
        peak_bytes, host_peak_bytes = step["peak_bytes"].item(), step["host_peak_bytes"].item()
        over = max(peak_bytes - self.budget_bytes, 0)
        if self.hardware.host_memory_bytes:
            over = max(over, host_peak_bytes - self.hardware.host_memory_bytes)
        step_s, flaws = step["now_s"].item(), step["flaws"].item()
        return RunResult(
            step_s=step_s,
            peak_bytes=peak_bytes,
            feasible=not flaws,
            over_bytes=max(over, 1) if flaws else 0,
            average_bytes=step["byte_seconds"].item() / step_s if step_s > 0 else 0.0,
            host_peak_bytes=host_peak_bytes,
            link_bytes=step["link_bytes"].item(),
            exposed_s=tuple(step[f"{cause}_s"].item() for cause in CAUSES),
            flaws=flaws,
            first_over=step["first_over"].item(),
        )
