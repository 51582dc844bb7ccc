"""Trains, and prints the heap in front of each optimizer step, as JSON. Run by test_held_memory.py.

Usage: memory_in_front_of_the_optimizer.py ACTIVATION OPTIONS, where OPTIONS is JSON for
`cswap.install`, or "null" for none.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time

import torch
from torch import nn

import cswap

STEPS = 5
SETTLES_S = 1.0  # the thread that gives memory back looks now and then


class Mallinfo2(ctypes.Structure):
    """See `man mallinfo`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


LIBC = ctypes.CDLL(None)


def heap_bytes():
    """That malloc has handed out, by its own count."""
    gc.collect()
    found = LIBC.mallinfo2()
    return found.uordblks + found.hblkhd


def main(activation, options):
    LIBC.mallinfo2.restype = Mallinfo2
    torch.manual_seed(0)
    # So no codec is tried later, and compiled for that. torch.use_deterministic_algorithms would
    # import torch's compiler, which takes five seconds. So would an optimizer of torch's, below.
    torch._C._set_deterministic_algorithms(True)
    layers = (m for _ in range(6) for m in (nn.Linear(256, 256), getattr(nn, activation)()))
    net = nn.Sequential(*layers)
    momenta = [torch.zeros_like(p) for p in net.parameters()]
    x = torch.randn(4096, 256)  # each activation: 4 MiB

    @torch.no_grad()
    def optimize():
        for parameter, momentum in zip(net.parameters(), momenta, strict=True):
            assert parameter.grad is not None
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(momentum, alpha=0.01)
            parameter.grad = None

    def step():
        loss = net(x).square().mean()
        forward = heap_bytes()
        loss.backward()
        del loss
        found = heap_bytes()
        optimize()
        return forward, found

    step()
    # The accuracy guard gives gradients of outputs, for which torch imports sympy: 14 MiB.
    torch.autograd.grad(net(x[:1]), next(net.parameters()), torch.ones(1, 256))
    codec = options.get("codec", "zvc") if options else "zvc"
    for warm in () if options is None else (codec, "auto"):
        with cswap.install(net, codec=warm, guard_every=0):
            step()  # compiles
    gc.freeze()  # else each collection goes through all that torch has imported, 18 times
    before = heap_bytes()
    handle = None if options is None else cswap.install(net, **options)
    rows = [step() for _ in range(STEPS)]
    held = {
        "forward": [forward - before for forward, _ in rows],
        "step": [found - before for _, found in rows],
    }
    dropped = net(x).square().mean()
    del dropped  # without a backward
    if handle is not None:
        handle.remove()
        time.sleep(SETTLES_S)
    held["removed"] = heap_bytes() - before
    sys.stdout.write(json.dumps(held))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
