"""Plans of the published policies: the simulator's prediction, and the engine's step.

A plan is made for the trace of a plain step of the twin (`tracing.py`), on the twin's rates. The
simulator predicts its step. Then the real engine follows the plan on the twin, and once more with a
host that takes no time, since the simulator has none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from bench.twin.methods import CHECKPOINT, PLAIN, PLANNED
from bench.twin.profiles import PROFILES, Host
from bench.twin.runs import call, rows
from bench.twin.tracing import CODECS
from cswap.codecs.traits import CodecRate
from cswap.errors import BudgetError
from cswap.plan import planner
from cswap.plan.hardware import LEAST_SHARE, Hardware
from cswap.schema.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.twin.profiles import Profile
    from cswap.schema.plan import Plan

RECOMPUTE: Final = ("home", "capuchin")
"""Policies whose papers compute single tensors again."""

POLICIES: Final = tuple(planner.POLICIES)

PLANNED_MODELS: Final = ("gpt2-small", "resnet50")
"""Models that policies are compared on, unless others are named."""

ROUNDS: Final = 8
"""Of bisection, for the least budget of a policy that has no plan for the common one."""

LIMIT_S: Final = 60.0
"""Time limit of a policy."""

FREE: Final = {"host": {f.name: 0.0 for f in fields(Host) if f.name != "pin_bytes_per_s"}}
"""Changes of a profile: a host that takes no time."""


def hardware_of(profile: Profile) -> Hardware:
    """The rates of a machine of the twin, for a simulation of plans. It has no host."""
    rates = {name: CodecRate(*profile.codec_rates(name), profile.kernel_s) for name in CODECS}
    return Hardware(
        name=profile.name,
        memory_bytes=profile.device_bytes,
        flops={},
        memory_bytes_per_s=profile.memory,
        d2h_bytes_per_s=profile.out,
        h2d_bytes_per_s=profile.back,
        duplex_factor=profile.both / profile.out,
        link_latency_s=profile.copy_s,
        codec_tax=min(profile.overlap, 1 - LEAST_SHARE),
        codecs=rates,
    )


def compared(model: str, profile: str, policies: Sequence[str]) -> list[dict[str, Any]]:
    """A row per policy: figures of its plan, predicted and executed.

    Args:
        model: of `bench.twin.models.ALL`.
        profile: of `PROFILES`.
        policies: of `POLICIES`.
    """
    same = {"model": model, "profile": profile}
    trace = Trace.parse(call("tracing", same))
    plain, checkpoint = rows({**same, "method": m} for m in (PLAIN, CHECKPOINT))
    machine, budget = hardware_of(PROFILES[profile]), checkpoint["peak_bytes"]
    positions = [t.saved for t in trace.tensors if t.saved >= 0]
    again = frozenset(call("chains", {**same, "positions": positions}))
    task = _Task(trace, machine, again)
    plans = {p: task.plan(p, budget, plain["peak_bytes"]) for p in policies}
    found = [{"model": model, "policy": policy, **_about(plan)} for policy, plan in plans.items()]
    planned = [{**same, "method": PLANNED, "plan": plan.to_dict()} for plan in plans.values()]
    for row, done, free in zip(
        found, rows(planned), rows({**run, "changes": FREE} for run in planned), strict=True
    ):
        row["done"], row["free_host"] = _figures(done), _figures(free)
    return found


@dataclass(frozen=True, slots=True)
class _Task:
    """The conditions that plans are made for.

    Attributes:
        trace: the step.
        machine: its rates.
        again: positions of the tensors that the engine can compute again one by one.
    """

    trace: Trace
    machine: Hardware
    again: frozenset[int]

    def plan(self, policy: str, least: int, most: int) -> Plan:
        """Of a policy, for the least of these budgets that it has a plan for."""
        if policy == "none":
            return self._followed(policy, 2 * most)
        try:
            return self._followed(policy, least)
        except BudgetError:
            found = self._followed(policy, most)
        for _ in range(ROUNDS):
            middle = (least + most) // 2
            try:
                found, most = self._followed(policy, middle), middle
            except BudgetError:
                least = middle
        return found

    def _followed(self, policy: str, budget: int) -> Plan:
        again = self.again if policy in RECOMPUTE else False
        made = planner.plan(
            self.trace, self.machine, budget, policy, recompute=again, time_limit=LIMIT_S
        )
        # No modules, so that they are not run again as a whole.
        single = {p: replace(d, module="") for p, d in made.decisions.items()}
        return replace(made, decisions=single)


def _about(plan: Plan) -> dict[str, Any]:
    actions = Counter(d.action for d in plan.decisions.values())
    return {
        "budget_bytes": plan.budget_bytes,
        "actions": dict(actions),
        "predicted": {k: plan.predicted[k] for k in ("step_s", "peak_bytes")},
    }


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    # Of a run: stats are of all its steps.
    if "failure" in row:
        return {"failure": row["failure"]}
    stats, n_steps = row["cswap"], len(row["steps_s"])
    return {
        **{k: row[k] for k in ("step_s", "peak_bytes", "peak_of_all_bytes", "host_s", "link_s")},
        "moved": {codec: c["count"] / n_steps for codec, c in stats["by_codec"].items()},
        **{k: stats[k] for k in ("fallbacks_by_reason", "kept_by_reason")},
    }
