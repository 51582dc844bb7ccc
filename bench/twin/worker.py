"""Trains one model in one way on the twin, and prints its row: `python -m bench.twin.worker JSON`.

The JSON has the arguments of `run`. A process is the twin until it ends.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from bench.twin.process import DEVICE, become  # before cswap is imported
from bench.twin.profiles import PROFILES

if TYPE_CHECKING:
    import torch

    from bench.gpu.training import Task
    from bench.twin.cuda import ClockedCuda

N_TIMED: Final = 10
"""Last steps, of which the median counts; peaks are of that step, and of all."""

N_STEPS: Final = 13
"""As in `bench gpu`."""

N_STEPS_FIT: Final = 60
"""The same with a goal, as by default: it explores, plans, and settles."""


def run(
    model: str,
    method: str,
    profile: str,
    *,
    draws: bool = False,
    changes: dict[str, Any] | None = None,
    n_steps: int | None = None,
    batch: int | None = None,
    step_type: type[Step] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return a row.

    Args:
        model: of `bench.twin.models.ALL`.
        method: of `bench.twin.methods.METHODS`.
        profile: of `PROFILES`.
        changes: fields of the profile, and of its ``host``, that are to be others.
        n_steps: of the training; default: `N_STEPS`, or `N_STEPS_FIT` with a goal.
        batch: of a step; default: the model's. With a goal, the largest one is in the row.
        step_type: runs the steps; default: `Step`.
        draws: whether the last step's work is in the row, as ``spans``.
        options: more options of `cswap.install`.
    """
    machine = PROFILES[profile]
    if changes:
        changes = {**changes, "host": replace(machine.host, **changes.get("host", {}))}
        machine = replace(machine, **changes)
    gc.disable()  # it would run at other moments in another process
    cuda = become(machine)
    import torch

    import cswap
    from bench.twin.methods import CSWAP, switch_on
    from bench.twin.models import ALL
    from cswap.devices.cuda import cuda_device

    task = ALL[model] if batch is None else replace(ALL[model], batch=batch)
    with torch.device("meta"):
        net = task.build().to(task.weights)
    _materialise(net, cuda)
    switch_on(method, net)
    options = {**CSWAP.get(method, {}), **options}
    handle = cswap.install(net, **options) if method in CSWAP else None
    if handle is not None:
        cuda.runs_callbacks_of(cuda_device(0))
    step = (step_type or Step)(cuda, task, net, method)
    fits = method in CSWAP and ("fit" in options or not options)
    steps = [step() for _ in range(n_steps or (N_STEPS_FIT if fits else N_STEPS))]
    timed = sorted(steps[-N_TIMED:], key=lambda s: s["step_s"])
    goal = None if handle is None else handle.goal
    row = {
        "model": model,
        "method": method,
        "profile": profile,
        **timed[len(timed) // 2],
        "peak_of_all_bytes": max(s["peak_bytes"] for s in steps),
        "steps_s": [s["step_s"] for s in steps],
        "cswap": None if handle is None else handle.stats.to_dict(),
        "goal": None if goal is None else str(goal),
        "predicted_bytes": None if goal is None else goal.predicted_bytes,
    }
    if draws:
        row["spans"] = cuda.spans
    if batch is not None and handle is not None:
        row["largest_batch"] = handle.largest_batch()
    assert not cuda.faults, cuda.faults[:3]
    if handle is not None:
        handle.remove()
    return row


class Step:
    """A training step: forward, loss, backward, optimizer."""

    def __init__(self, cuda: ClockedCuda, task: Task, net: Any, method: str) -> None:
        from bench.twin.optimizer import TimedOptimizer

        self._cuda, self._task, self._net, self._method = cuda, task, net, method
        self._inputs = _inputs(cuda, task)
        self._parameters = list(net.parameters())
        self._states: list[torch.Tensor] = []  # of the optimizer, which makes them in a first step
        self._optimizer = TimedOptimizer(self._parameters, self._update)

    def __call__(self) -> dict[str, Any]:
        cuda = self._cuda
        gc.collect()
        cuda.synchronize()
        cuda.spans = []
        cuda.step_peak_bytes = 0
        began_s, waited_s, busy = cuda.now_s, cuda.waited_s, cuda.busy_s()
        counts, link_s = dict(cuda.counts), dict(cuda.link_s)
        cuda.counting = True
        self._train()
        cuda.synchronize()
        cuda.counting = False
        step_s = cuda.now_s - began_s
        busy_s = {k: v - busy.get(k, 0.0) for k, v in cuda.busy_s().items()}
        assert all(0 <= v <= step_s * (1 + 1e-9) for v in busy_s.values()), (busy_s, step_s)
        return {
            "step_s": step_s,
            "peak_bytes": cuda.step_peak_bytes,
            "host_s": step_s - (cuda.waited_s - waited_s),
            "busy_s": {k: v for k, v in busy_s.items() if v},
            "link_s": {k: v - link_s[k] for k, v in cuda.link_s.items()},
            "calls": {k: v - counts.get(k, 0) for k, v in cuda.counts.items()},
        }

    def _train(self) -> None:
        from bench.twin.methods import around

        task, (x, y) = self._task, self._inputs
        for p in self._parameters:
            p.grad = None
        with self._autocast():
            with around(self._method, self._cuda):
                out = self._net(x)
            loss = task.loss(out, y)
        del out
        loss.backward()
        del loss
        self._optimizer.step()

    def _autocast(self) -> torch.autocast:
        import torch

        dtype = self._task.autocast
        return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)

    def _update(self) -> None:
        from bench.twin.models import PASSES, STATES, optimizer

        task = self._task
        self._states = self._states or [
            self._cuda.empty(p.numel(), dtype=p.dtype, device=DEVICE)
            for p in self._parameters
            for _ in range(STATES[optimizer(task)])
        ]
        nbytes = PASSES[optimizer(task)] * sum(p.nbytes for p in self._parameters)
        self._cuda.stream_now().work(nbytes / self._cuda.profile.memory, "optimizer")


def _inputs(cuda: ClockedCuda, task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    sizes = (task.batch, *task.input_sizes)
    x = cuda.empty(sizes, dtype=torch.int64 if task.tokens else torch.float32, device=DEVICE)
    images = len(task.target_sizes) == len(x.shape) and not task.tokens
    dtype = torch.float32 if images else torch.int64
    return x, cuda.empty(task.target_sizes, dtype=dtype, device=DEVICE)


def _materialise(net: Any, cuda: ClockedCuda) -> None:
    # Gives a model of the meta device memory of the stand-in; tied parameters stay tied.
    from torch import nn

    made: dict[int, Any] = {}
    for module in net.modules():
        for table in (module._parameters, module._buffers):  # noqa: SLF001
            for name, x in table.items():
                if x is None:
                    continue
                if id(x) not in made:
                    memory = cuda.empty(tuple(x.shape), dtype=x.dtype, device=DEVICE)
                    made[id(x)] = x, nn.Parameter(memory) if isinstance(x, nn.Parameter) else memory
                table[name] = made[id(x)][1]


if __name__ == "__main__":
    found = run(**json.loads(sys.argv[1]))
    print(json.dumps(found))
