"""An older torch, which does not tell the hooks on top, nor what a node's slots hold."""

from __future__ import annotations

import torch

import cswap
from cswap.engine import recomputer

BEFORE_2_8 = """
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

autograd = torch._C._autograd
top = getattr(autograd, "_top_saved_tensors_default_hooks", None)
if top is not None:
    del autograd._top_saved_tensors_default_hooks

import cswap
from cswap import hook_stack

if top is not None:  # torch 2.14 asks for it itself
    autograd._top_saved_tensors_default_hooks = top

def assert_same_top():
    if top is not None:
        assert hook_stack.top(True) == top(True)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm = nn.LayerNorm(256)

    def forward(self, x):
        assert_same_top()
        with save_on_cpu():
            assert_same_top()
            y = torch.relu(self.wide(x))
        assert_same_top()
        y = checkpoint(self.norm, y, use_reentrant=False)
        assert_same_top()
        return x + self.narrow(y)

torch.manual_seed(0)
plain, mine = (nn.Sequential(Block(), Block(), nn.Linear(64, 8)) for _ in range(2))
mine.load_state_dict(plain.state_dict())
handle = cswap.install(mine, codec="zvc", min_bytes=1024)
for step in range(24):
    x = torch.randn(128, 64)
    for net in (plain, mine):
        net.zero_grad()
        if step == 5:  # an error inside
            try:
                net(torch.randn(128, 63))
            except RuntimeError:
                pass
        net(x).square().sum().backward()
        assert hook_stack.top(True) is None
        assert_same_top()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), mine.parameters()))
assert handle.stats.swapped > 0
handle.remove()
print("right")
"""


def test_the_hooks_on_top_are_known_before_torch_2_8(forked):
    done = forked.run(BEFORE_2_8)
    assert done.returncode == 0, done.stderr
    assert "right" in done.stdout


def test_nothing_is_computed_again_where_slots_cannot_be_read(monkeypatch):
    monkeypatch.setattr(recomputer, "CAN_READ", False)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    with cswap.install(net, min_bytes=0, slowdown=1e6) as handle:
        for _ in range(4):
            net(torch.randn(128, 64)).square().sum().backward()
        assert "remat" not in handle.stats.by_codec
        assert handle.stats.packed > 0
    with cswap.install(net, min_bytes=0, fit="1GiB") as handle:
        for _ in range(8):
            net(torch.randn(128, 64)).square().sum().backward()
        assert handle.goal is not None
        assert not handle.goal.actions["remat"]
