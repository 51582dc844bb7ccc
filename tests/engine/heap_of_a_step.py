"""Trains, and prints the heap of each step, as JSON. Run by test_heap_of_a_step.py.

Usage: heap_of_a_step.py MODEL OPTIONS, where OPTIONS is JSON for `cswap.install`, or "null" for
none. Of each step: MiB between forward and backward, and the most in backward.
"""

from __future__ import annotations

import gc
import json
import sys
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import cswap
from bench.workloads.saved_bytes import HeapSampler, heap_bytes
from cswap.fit import controller

STEPS = 4
MIB = 1 << 20


class Rectified(nn.Module):
    """A small input, and one activation of 8 MiB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 512), nn.ReLU())

    def forward(self, x):
        return self.layers(x).sum()

    def batch(self):
        return (torch.randn(4096, 8),)


class Recurrent(nn.Module):
    """Cells whose gates are parts of one storage, 32 MiB in all."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, 128)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 128)
        found = 0.0
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            found = found + h.square().mean()
        return found

    def batch(self):
        return (torch.randn(256, 32, 8),)


class Recommender(nn.Module):
    """A small DLRM: bags of embeddings, perceptrons, products of pairs; 30 MiB."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(1000, 32, mode="sum") for _ in range(8))
        self.bottom = perceptron(13, 128, 32)
        self.top = perceptron(36 + 32, 256, 128, 1)
        self.pairs = torch.tril_indices(9, 9, -1)

    def forward(self, dense, indices):
        x = self.bottom(dense)
        z = torch.stack([x, *(bag(indices[k]) for k, bag in enumerate(self.bags))], 1)
        products = torch.bmm(z, z.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1)).square().mean()

    def batch(self):
        return torch.randn(8192, 13), torch.randint(0, 1000, (8, 8192, 4))


class Points(nn.Module):
    """Like PointNet: the last activations are the largest, of 32 MiB each."""

    def __init__(self):
        super().__init__()
        widths = [3, 64, 64, 64, 128, 512]
        self.layers = nn.Sequential(
            *(
                m
                for n, more in pairwise(widths)
                for m in (nn.Conv1d(n, more, 1), nn.BatchNorm1d(more), nn.ReLU())
            )
        )

    def forward(self, x):
        return self.layers(x).amax(-1).square().mean()

    def batch(self):
        return (torch.randn(16, 3, 1024),)


class Graph(nn.Module):
    """Like a graph transformer: keys and values of each edge's ends, 8 edges a node; 68 MiB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(64, 64) for _ in "qkv") for _ in "12")

    def forward(self, x, edges):
        source, target = edges
        products: Any
        for products in self.layers:
            query, key, value = products
            q, k, v = query(x)[target], key(x)[source], value(x)[source]
            alpha = (q * k).sum(1) / 8
            weight = (alpha - alpha.max().detach()).exp()
            total = weight.new_zeros(len(x)).index_add(0, target, weight) + 1e-6
            mixed = torch.zeros_like(x).index_add(0, target, v * weight[:, None])
            x = (mixed / total[:, None]).relu()
        return x.square().mean()

    def batch(self):
        return torch.randn(4096, 64), torch.randint(4096, (2, 8 * 4096))


class Mixed(nn.Module):
    """Autocast copies each weight; there are few activations."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).float().square().mean()

    def batch(self):
        return (torch.randn(8, 1024),)


def perceptron(*widths):
    pairs = pairwise(widths)
    return nn.Sequential(*(m for n, more in pairs for m in (nn.Linear(n, more), nn.ReLU())))


MODELS = {kind.__name__: kind for kind in (Rectified, Recurrent, Recommender, Points, Graph, Mixed)}


class AtOnce:
    """A plan is made between two steps: beside one, the solver's memory would count."""

    done = True

    def __init__(self, work):
        self._plan = work()

    def result(self):
        return self._plan


def main(name, options):
    torch.manual_seed(0)
    setattr(controller, "Background", AtOnce)  # noqa: B010 - of another type
    torch._C._set_deterministic_algorithms(True)  # no codec is tried later, and compiled for that
    net = MODELS[name]()
    batch = net.batch()

    optimizer = torch.optim.SGD(net.parameters(), 0.0)

    def step():
        loss = net(*batch)
        gc.collect()
        between = heap_bytes()
        sampler = HeapSampler(0)
        with sampler.running():
            loss.backward()
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad = None
        return between, sampler.curve.peak

    step()
    for _ in range(0 if options is None else 2):  # compiles
        with cswap.install(net, **options):
            for _ in range(2):
                step()
    gc.collect()
    gc.freeze()
    before = heap_bytes()
    handle = None if options is None else cswap.install(net, **options)
    rows = [step() for _ in range(STEPS)]
    found = {
        "between": [(between - before) / MIB for between, _ in rows],
        "peak": [(peak - before) / MIB for _, peak in rows],
        "swapped": 0 if handle is None else handle.stats.swapped,
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
