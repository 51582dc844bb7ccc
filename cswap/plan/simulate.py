"""The simulator's front: plans and arrays in, step time, exposed time and memory out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cswap.plan.hardware import Hardware
    from cswap.schema.plan import Plan
    from cswap.schema.trace import Trace

KEEP, SWAP, RECOMPUTE = 0, 1, 2


class RunResult(NamedTuple):
    """What one candidate costs.

    Attributes:
        step_s: end of the last operator.
        peak_bytes: most device memory at any time, resident bytes included.
        feasible: within the device and host budgets all along.
        over_bytes: bytes over the device or host budget at the worst moment; 0 if feasible.
        average_bytes: device memory, mean over time.
        host_peak_bytes: most host memory at any time.
        link_bytes: copied, both directions together.
        exposed_s: by cause, in the order of `CAUSES`.
    """

    step_s: float
    peak_bytes: int
    feasible: bool
    over_bytes: int
    average_bytes: float
    host_peak_bytes: int
    link_bytes: int
    exposed_s: tuple[float, float, float, float, float]


CAUSES = ("swap_in", "swap_out", "memory", "codec", "recompute")


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a plan costs, simulated.

    Attributes:
        step_s: end of the last operator.
        compute_s: sum of the operators' durations; step_s = compute_s + sum of exposed.
        exposed: seconds by cause: ``swap_in``, ``swap_out``, ``memory``, ``codec``, ``recompute``.
        peak_bytes: most device memory at any time, resident bytes included.
        average_bytes: device memory, mean over time.
        host_peak_bytes: most host memory at any time.
        link_bytes: copied, both directions together.
        feasible: within the device and host budgets all along.
        violations: what was broken, in words; empty if feasible.
        timeline: what ran when; None unless asked for.
    """

    step_s: float
    compute_s: float
    exposed: Mapping[str, float]
    peak_bytes: int
    average_bytes: float
    host_peak_bytes: int
    link_bytes: int
    feasible: bool
    violations: tuple[str, ...] = ()
    timeline: Any = None


class Simulator:
    """A trace on a machine within a budget, prepared for many candidates.

    Attributes:
        trace, hardware, budget_bytes: as given (budget None: all of the device's memory).
        swappable: tensor index by position in the arrays: the saved tensors in saved order.
        saved: key in a plan (`TraceTensor.saved`) by position in the arrays.
        codecs: names; index 0 is ``raw``.
        ratios: [n, codecs] raw over encoded bytes; 1 where nothing is known.
        nbytes: [n] raw bytes.
        forward, backward: [n] operator index f (last forward use) and b (first backward use).
        order: [n] positions in order of first backward use: the order of swap-ins.
        recomputable: [n] whether the trace says how to compute it again.
        encoded_bytes, encode_s, decode_s, d2h_s, h2d_s: [n, codecs] each alone.
        compute_s: sum of the operators' durations.
        worst_s: more than any feasible plan's step takes (no overlap at all, slowest codec).
    """

    def __init__(self, trace: Trace, hardware: Hardware, budget_bytes: int | None = None) -> None: ...

    def run(
        self, action: NDArray[np.int8], codec: NDArray[np.int8], prefetch: NDArray[np.int32]
    ) -> RunResult:
        """Simulate one candidate.

        Args:
            action: [n] 0 keep, 1 swap, 2 recompute.
            codec: [n] index into `codecs`; read where action is 1.
            prefetch: [n] operator index from whose start on the swap-in may start, f < p <= b
                (clipped to that); read where action is 1.
        """
        raise NotImplementedError

    def earliest_prefetch(
        self, action: NDArray[np.int8], codec: NDArray[np.int8]
    ) -> NDArray[np.int32]:
        """[n] the earliest starts of swap-ins that memory allows, in order of backward uses."""
        raise NotImplementedError

    def to_plan(
        self,
        action: NDArray[np.int8],
        codec: NDArray[np.int8],
        prefetch: NDArray[np.int32] | None = None,
        policy: str = "",
    ) -> Plan:
        """The plan of a candidate; prefetch None: as early as memory allows."""
        raise NotImplementedError

    def from_plan(
        self, plan: Plan
    ) -> tuple[NDArray[np.int8], NDArray[np.int8], NDArray[np.int32]]:
        """Arrays action, codec, prefetch of a plan."""
        raise NotImplementedError


def simulate(
    trace: Trace,
    hardware: Hardware,
    plan: Plan,
    budget_bytes: int | None = None,
    *,
    timeline: bool = False,
) -> Simulation:
    """Simulate a plan."""
    raise NotImplementedError


def smallest_feasible_budget(trace: Trace, hardware: Hardware) -> int:
    """Least device memory in which some plan runs."""
    raise NotImplementedError
