"""Real tensors to measure codecs on, recorded from the demo's models after a little training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.workloads.small_models import Block, Gpt
from bench.workloads.tasks import make_task
from cswap.experiments.codecs.case import Case, case_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.workloads.small_models import Net
    from cswap.experiments.task import Task

WARM_STEPS: Final = 30
"""Steps of training before recording: activations of an untrained model are not typical."""

_FLOATS: Final = (torch.float32, torch.bfloat16)


def record(nbytes: int, *, quick: bool = False) -> list[Case]:
    """Each kind of tensor in each dtype that training would save it in, of about ``nbytes``.

    Nothing is repeated to fill up: fresh batches are run until there is enough.
    """
    cnn, cnn_task = trained("cnn", quick=quick)
    gpt, gpt_task = trained("gpt", quick=quick)
    floats = {
        "relu": _collect(cnn, cnn_task, nn.ReLU, lambda _, out: out, nbytes),
        "gelu": _collect(gpt, gpt_task, nn.GELU, lambda _, out: out, nbytes),
        "softmax": _collect(gpt, gpt_task, nn.LayerNorm, _attention_of(gpt), nbytes),
        "gradient": _gradients(cnn, cnn_task, nbytes),
    }
    found = [(kind, x.to(dtype)) for kind, x in floats.items() for dtype in _FLOATS]
    found += [
        ("mask", _collect(cnn, cnn_task, nn.MaxPool2d, _dropout_mask, nbytes)),
        ("index", _collect(cnn, cnn_task, nn.MaxPool2d, _pool_indices, nbytes)),
        ("token", _tokens(gpt_task, nbytes)),
    ]
    return [case_of(kind, x, family="recorded") for kind, x in found]


def trained(name: str, *, quick: bool) -> tuple[Net, Task]:
    """One of TASKS and its model after WARM_STEPS of training (2 if quick), from seed 0."""
    task = make_task(name, quick=quick, n_steps=WARM_STEPS)
    return train(task, quick=quick), task


def train(task: Task, *, quick: bool) -> Net:
    """The task's model after WARM_STEPS of training (2 if quick), from seed 0."""
    torch.manual_seed(0)
    net: Net = task.build()
    optimizer = task.optimizer(net)
    for step in range(2 if quick else WARM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = task.lr(step)
        inputs, targets = task.batch(0, step)
        optimizer.zero_grad()
        functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return net


def _collect(
    net: Net,
    task: Task,
    kind: type[nn.Module],
    take: Callable[[tuple[Tensor, ...], Tensor], Tensor],
    nbytes: int,
) -> Tensor:
    # Run fresh batches, and join the results of `take` on each module's inputs and output.
    pieces: list[Tensor] = []

    def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pieces.append(take(inputs, output).detach().reshape(-1).clone())

    handles = [m.register_forward_hook(hook) for m in net.modules() if isinstance(m, kind)]
    step = 1000  # batches that were not trained on
    with torch.no_grad():
        while sum(p.numel() * p.element_size() for p in pieces) < nbytes:
            net(task.batch(0, step)[0])
            step += 1
    for handle in handles:
        handle.remove()
    return _cut(torch.cat(pieces), nbytes)


def _cut(x: Tensor, nbytes: int) -> Tensor:
    return x[: nbytes // x.element_size()].clone()


def _attention_of(net: Net) -> Callable[[tuple[Tensor, ...], Tensor], Tensor]:
    # Attention is fused and never shows its probabilities: compute them from the norm's output.
    assert isinstance(net, Gpt)
    block = net.blocks[0]
    assert isinstance(block, Block)
    qkv, n_heads = block.qkv, block.n_heads

    def probabilities(_inputs: tuple[Tensor, ...], normed: Tensor) -> Tensor:
        batch, time, width = normed.shape
        heads = qkv(normed).view(batch, time, 3, n_heads, width // n_heads)
        q, k, _ = heads.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // n_heads) ** 0.5
        future = torch.ones(time, time, dtype=torch.bool).triu(1)
        found: Tensor = scores.masked_fill(future, float("-inf")).softmax(-1)
        return found

    return probabilities


def _gradients(net: Net, task: Task, nbytes: int) -> Tensor:
    # Gradients with respect to activations, as double backward would save them.
    pieces: list[Tensor] = []

    def hook(_module: nn.Module, _inputs: object, outputs: tuple[Tensor, ...]) -> None:
        pieces.append(outputs[0].detach().reshape(-1).clone())

    handles = [
        m.register_full_backward_hook(hook) for m in net.modules() if isinstance(m, nn.Conv2d)
    ]
    step = 1000
    while sum(p.numel() * p.element_size() for p in pieces) < nbytes:
        inputs, targets = task.batch(0, step)
        inputs.requires_grad_()  # otherwise torch warns about the hook
        functional.cross_entropy(net(inputs), targets).backward()
        step += 1
    for handle in handles:
        handle.remove()
    net.zero_grad()
    return _cut(torch.cat(pieces), nbytes)


def _dropout_mask(_inputs: tuple[Tensor, ...], pooled: Tensor) -> Tensor:
    return torch.native_dropout(pooled, 0.25, True)[1]


def _pool_indices(inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
    return functional.max_pool2d(inputs[0], 2, return_indices=True)[1]


def _tokens(task: Task, nbytes: int) -> Tensor:
    n_batches = -(-nbytes // task.batch(0, 0)[0].nbytes)
    return _cut(torch.cat([task.batch(0, s)[0].reshape(-1) for s in range(n_batches)]), nbytes)
