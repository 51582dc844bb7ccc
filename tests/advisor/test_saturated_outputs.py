"""Outputs whose backward takes one less themselves stay exact where lossy codecs are allowed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import cswap


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid])
@pytest.mark.parametrize("options", [{}, {"fit": "min", "slowdown": 30.0}], ids=["", "goal"])
def test_gradients_through_saturated_outputs_keep_their_bits(activation, options):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 256), activation())
    ours, x = copy.deepcopy(plain), 20 * torch.randn(512, 64)
    wanted = torch.autograd.grad(plain(x).sum(), [*plain.parameters()])
    with cswap.install(ours, lossy="int8", min_bytes=0, exclude="0", guard_every=0, **options):
        for _ in range(6):
            found = torch.autograd.grad(ours(x).sum(), [*ours.parameters()])
            assert all(map(torch.equal, found, wanted))
