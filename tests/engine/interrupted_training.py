"""Trains under Ctrl-C at random moments; prints what came of it as JSON. Run by test_interrupts.py.

Usage: interrupted_training.py CODEC INTERRUPTS SEED
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter

import torch
from torch import nn
from torch.overrides import _get_current_function_mode

import cswap
from cswap import hook_stack

MOST_STEPS = 400
"""Steps after which an interrupt that was sent has vanished."""


class Net(nn.Module):
    """Layers that save results, masks and indices; several save the same tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        for layer in self.inner:
            x = torch.relu(layer(x)) + torch.tanh(self.norm(x))
        return nn.functional.max_pool1d(x, 2)


def gradients(net, x):
    """Of one step."""
    net.zero_grad()
    net(x).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def interrupt_after(seconds):
    """Send this process a SIGINT later."""
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGINT)


def train_until_interrupted(net, x, seconds):
    """Whether an interrupt that is sent meanwhile arrives."""
    thread = threading.Thread(target=interrupt_after, args=(seconds,))
    try:
        thread.start()
        for _ in range(MOST_STEPS):
            gradients(net, x)
    except KeyboardInterrupt:
        return True
    finally:
        thread.join()
    return False


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def held_bytes():
    """Of all live tensors, each storage once."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if type(x) is torch.Tensor:
            storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    return sum(storages.values())


def main(codec, n, seed):
    torch.set_num_threads(1)  # steps of a millisecond; on a busy machine threads wait for cores
    found: Counter[str] = Counter()
    rng = random.Random(seed)
    net, x = Net(), torch.randn(256, 64)
    plain = gradients(net, x)
    options = {"codec": codec} if codec != "auto" else {"policy": "static:zvc"}
    handle = cswap.install(net, min_bytes=0, guard_every=0, **options)
    gradients(net, x)
    gc.collect()
    gc.freeze()  # collections look at what the interrupted steps make, not at all of torch
    began = time.perf_counter()
    for _ in range(3):
        gradients(net, x)
    step_s = (time.perf_counter() - began) / 3
    for _ in range(n):
        found["vanished"] += not train_until_interrupted(net, x, rng.random() * 2 * step_s)
        # An interrupt may come where the hooks are taken off: then they wait for the next call.
        found["hooks left"] += getattr(hook_stack.owner_of_top(), "active", False)
        found["modes left"] += _get_current_function_mode() is not None
        found["scopes left"] += handle.engine.scopes.current.path != ""
        found["wrong gradients"] += codec != "int8" and not same(gradients(net, x), plain)
        gradients(net, x)
        handle.engine.synchronize()
        gc.collect()
        stats = handle.stats
        found["bytes held"] += (stats.device_bytes, stats.host_bytes) != (0, 0)
    net.zero_grad()
    handle.remove()
    found["wrong after remove"] += not same(gradients(net, x), plain)
    net.zero_grad()
    del handle
    found["held bytes"] = held_bytes()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
