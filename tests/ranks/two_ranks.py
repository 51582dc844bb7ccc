"""Trains under torch.distributed, without cswap and with it. Run by two processes at a time.

    two_ranks.py RANK FOLDER CASES

CASES is a JSON list of names. The processes meet by a file in FOLDER. Each writes one line of JSON
per case to FOLDER/RANK.jsonl. A case that waits for the other process longer than WAIT fails.
Cases import wrappers themselves: each of those takes up to a second of CPU time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
import traceback
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cswap
from cswap.advisor import live_costs
from cswap.advisor.calibration import Calibration
from cswap.codecs.traits import CodecRate
from cswap.ranks import local_part

WORLD, WAIT = 2, timedelta(seconds=90)
STEPS, ROWS, WIDTH = 3, 128, 128
FORCED: dict[str, Any] = {"codec": "zvc", "min_bytes": 0}


class Recorder(TorchDispatchMode):
    """Notes collectives and messages, with the shapes of their tensors, in the order of calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
            self.calls.append((str(func), [tuple(x.shape) for x in tensors]))
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.ReLU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        # The last relu saves what comes after a tensor-parallel ``down`` and its collective.
        return torch.relu(x + self.down(self.act(self.up(self.norm(x)))))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(Block(), Block()))


def batch(step, rank):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_square(out, _target=None):
    return out.square().mean()


def one_backward(model, step, rank):
    mean_square(model(batch(step, rank))).backward()


def accumulated(model, step, rank):
    with model.no_sync():
        one_backward(model, step, rank)
    one_backward(model, step + 50, rank)


def gradients(model):
    return [local_part(p.grad).clone() for p in model.parameters()]


def train(install, wrap=lambda m: m, *, before=False, run=one_backward, same=False, steps=STEPS):
    """Gradients of all steps.

    Args:
        install: takes the model; before ``wrap`` if ``before``, else its result.
        wrap: makes what is trained of the model.
        before: see ``install``.
        run: forward and backward.
        same: whether ranks have the same batches.
        steps: how many.
    """
    model = network()
    if before:
        install(model)
    model = wrap(model)
    if not before:
        install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        run(model, step, 0 if same else dist.get_rank())
        found += gradients(model)
        optimizer.step()
    return found


# --------------------------------------------------------------------------- wrappers of torch's


def ddp(install, *, before=False, run=one_backward, **options):
    return train(install, partial(DistributedDataParallel, **options), before=before, run=run)


def shard(model, **options):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model[0]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp(install, *, before=False, reshard=True):
    return train(install, partial(shard, reshard_after_forward=reshard), before=before)


def in_parallel(model):
    from torch.distributed.tensor import parallel

    ways = {"0.*.up": parallel.ColwiseParallel(), "0.*.down": parallel.RowwiseParallel()}
    return parallel.parallelize_module(model, init_device_mesh("cpu", (WORLD,)), ways)


def in_sequence(model):
    """Tensor parallelism in which all activations are DTensors, sharded along the rows."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    mesh, rows = init_device_mesh("cpu", (WORLD,)), Shard(0)
    ways = {
        "0": parallel.PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(rows,)
        ),
        "0.*.norm": parallel.SequenceParallel(sequence_dim=0),
        "0.*.up": parallel.ColwiseParallel(input_layouts=rows, use_local_output=False),
        "0.*.down": parallel.RowwiseParallel(output_layouts=rows, use_local_output=False),
    }
    model = parallel.parallelize_module(model, mesh, ways)
    at_end = parallel.PrepareModuleOutput(
        output_layouts=(rows,), desired_output_layouts=(Replicate(),)
    )
    return parallel.parallelize_module(model, mesh, {"0": at_end})


def tensor_parallel(install, *, before=False, wrap=in_parallel):
    return train(install, wrap, before=before, same=True)


def pipeline(install, schedule):
    from torch.distributed import pipelining

    rank = dist.get_rank()
    part = nn.Sequential(network()[0][rank])
    install(part)
    stage = pipelining.PipelineStage(part, rank, WORLD, torch.device("cpu"))
    run = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=mean_square)
    found = []
    for step in range(STEPS):
        part.zero_grad()
        if rank == 0:
            run.step(batch(step, 0))
        else:
            run.step(target=batch(step, 0))
        found += gradients(part)
    return found


def equals(train_with):
    """A case: what cswap leaves as it is without cswap."""

    def case():
        with Recorder() as plain_calls:
            plain = train_with(lambda model: None)
        found: dict[str, Any] = {"collectives": len(plain_calls.calls)}
        for name, options in (("default", {}), ("forced", FORCED)):
            handles = []
            with Recorder() as calls:
                got = train_with(lambda m, o=options: handles.append(cswap.install(m, **o)))  # noqa: B023
            stats = ended(handles[0])
            found[name] = {
                "equal": same(got, plain),
                "same_collectives": calls.calls == plain_calls.calls,
                "swapped": stats.swapped,
                "kept": stats.kept_by_reason,
                "fallbacks": stats.fallbacks_by_reason,
                "held_bytes": stats.device_bytes + stats.host_bytes,
            }
        return found

    return case


def ended(handle):
    stats = handle.stats
    handle.remove()
    return stats


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def digest(tensors):
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in tensors)).hexdigest()


# ------------------------------------------------------------------ decisions that change values


@contextlib.contextmanager
def uneven():
    """Rank 1 measured other times than rank 0."""
    times: dict[str, Any] = {"int8": CodecRate(1e5, 1e5)}
    measured = Calibration({}, times)
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(patch.object(live_costs, "stored", lambda _kind: measured))
        yield


def lossy(**options):
    """A case: both ranks compute the same, as replicated layers do."""
    handles = []
    options = {"min_bytes": 0, "guard_every": 0, **options}
    with uneven():
        got = train(lambda m: handles.append(cswap.install(m, **options)), same=True, steps=6)
    exact = train(lambda m: None, same=True, steps=6)
    codecs = {name: c.count for name, c in ended(handles[0]).by_codec.items()}
    return {"gradients": digest(got), "exact": same(got, exact), "codecs": codecs}


def rounded_by_rank():
    return lossy(codec="int4", seed=dist.get_rank())


# --------------------------------------------------------------- modules that cswap runs again


class Reduced(nn.Linear):
    """Half of a sum over both ranks, as hand-written tensor parallelism has it."""

    def forward(self, x):
        return collective.all_reduce(super().forward(x).relu())


def collectives_so_far():
    """Number of collectives that this rank has started in all its groups."""
    groups: Any = tuple(dist.distributed_c10d._world.pg_map)
    return sum(int(group._get_sequence_number_for_group()) for group in groups)


def guarded():
    """A case: the guard of rank 0 alone checks a module that takes part in collectives."""
    torch.manual_seed(0)
    model = nn.Sequential(Reduced(WIDTH, WIDTH), Reduced(WIDTH, WIDTH))
    every = 2 if dist.get_rank() == 0 else 0
    handle = cswap.install(model, codec="int8", min_bytes=0, guard_every=every)
    before = collectives_so_far()
    for step in range(8):
        model.zero_grad()
        one_backward(model, step, 0)
    started = collectives_so_far() - before
    stats = ended(handle)
    return {
        "collectives": started,
        "gradients": digest(gradients(model)),
        "checks": stats.guard_checks,
        "fallbacks": stats.fallbacks_by_reason,
    }


def with_a_goal(wrap):
    """A case: rank 0 alone has a goal, explores, and plans."""
    goals: list[Any] = []
    products: list[str] = []

    def trained(install):
        handles: list[Any] = []

        def run(model, step, rank):
            one_backward(model, step, rank)
            if handles and handles[0].goal.phase == "planning":
                handles[0]._fit._planning._thread.join()

        def note(model):
            handles.extend(filter(None, [install(model)]))

        found = train(note, wrap, run=run, same=True, steps=8)
        goals.extend(handle.goal for handle in handles)
        for handle in handles:
            trials = handle.engine._state.recomputer.trials.by_site
            products.extend(op for (_, op, _), *_ in trials if "mm" in op)
            handle.remove()
        return found

    def install(model):
        if dist.get_rank() == 1:
            return None
        return cswap.install(model, fit="min", slowdown=1000, min_bytes=0)

    with Recorder() as plain_calls:
        plain = trained(lambda model: None)
    with Recorder() as calls:
        got = trained(install)
    return {
        "equal": same(got, plain),
        "same_collectives": calls.calls == plain_calls.calls,
        "phases": [goal.phase for goal in goals],
        "products": products,
    }


def left_by_codec(handle):
    """How many tensors have left so far, by their way."""
    return Counter({name: codec.count for name, codec in handle.stats.by_codec.items()})


def one_schedule():
    """A case: rank 0 explores, and saves its plan; then both ranks obey that from the start."""
    path = Path(sys.argv[2]) / "schedule.json"
    goal: dict[str, Any] = {"fit": "min", "slowdown": 1000, "min_bytes": 0}
    steps: list[list[Any]] = []

    def explored(model):
        handles.append(cswap.install(model, **goal) if dist.get_rank() == 0 else None)

    def explores(model, step, rank):
        one_backward(model, step, rank)
        if handles[0] is not None and handles[0].goal.phase == "planning":
            handles[0]._fit._planning._thread.join()

    def obeys(model, step, rank):
        before = left_by_codec(handles[-1])
        one_backward(model, step, rank)
        goal, left = handles[-1].goal, left_by_codec(handles[-1]) - before
        steps.append([goal.phase, goal.plans, dict(goal.actions), dict(left)])

    def scheduled(model):
        handles.append(cswap.install(model, schedule=path, **goal))

    handles: list[Any] = []
    parallel: Any = DistributedDataParallel
    train(explored, parallel, run=explores, steps=8)
    if handles[0] is not None:
        handles[0].schedule.save(path)
        handles[0].remove()
    dist.barrier()
    plain = train(lambda model: None, parallel, steps=6)
    got = train(scheduled, parallel, run=obeys, steps=6)
    fallbacks = ended(handles[-1]).fallbacks_by_reason
    return {"equal": same(got, plain), "steps": steps, "fallbacks": fallbacks}


# -------------------------------------------------------------------------------------- stats


def gathered():
    rank, model = dist.get_rank(), network()
    everywhere: list[Any] = [None] * dist.get_world_size()
    with cswap.install(model, **FORCED) as handle:
        for step in range(rank + 1):
            one_backward(model, step, rank)
        dist.all_gather_object(everywhere, handle.stats)
        mine = dataclasses.asdict(handle.stats)
    return {
        "mine": mine == dataclasses.asdict(everywhere[rank]),
        "packed": [s.packed for s in everywhere],
    }


CASES = {
    "ddp": equals(ddp),
    "ddp, installed before": equals(partial(ddp, before=True)),
    "ddp, accumulated": equals(partial(ddp, run=accumulated)),
    "ddp, static graph": equals(partial(ddp, before=True, static_graph=True)),
    "ddp, unused parameters": equals(partial(ddp, find_unused_parameters=True)),
    "fsdp2": equals(fsdp),
    "fsdp2, installed before": equals(partial(fsdp, before=True)),
    "fsdp2, not resharded": equals(partial(fsdp, reshard=False)),
    "tensor parallel": equals(tensor_parallel),
    "tensor parallel, installed before": equals(partial(tensor_parallel, before=True)),
    "tensor parallel, all DTensors": equals(partial(tensor_parallel, wrap=in_sequence)),
    "pipeline, gpipe": equals(partial(pipeline, schedule="ScheduleGPipe")),
    "pipeline, 1f1b": equals(partial(pipeline, schedule="Schedule1F1B")),
    "lossy, chosen": partial(lossy, lossy="int8"),
    "lossy, forced": partial(lossy, codec="int8"),
    "rounded alike": partial(lossy, codec="int4"),
    "rounded by rank": rounded_by_rank,
    "guarded": guarded,
    "goal, ddp": partial(with_a_goal, DistributedDataParallel),
    "goal, fsdp2": partial(with_a_goal, shard),
    "goal, tensor parallel": partial(with_a_goal, in_parallel),
    "schedule, ddp": one_schedule,
    "gathered": gathered,
}


def main(rank, folder, names):
    torch.set_num_threads(1)
    store = torch._C._distributed_c10d.FileStore(str(folder / "meet"), WORLD)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=WAIT, store=store)
    with (folder / f"{rank}.jsonl").open("w") as out:
        for name in names:
            try:
                found = CASES[name]()
            except Exception:
                found = {"error": traceback.format_exc()}
            out.write(json.dumps({"case": name, **found}) + "\n")
            out.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
