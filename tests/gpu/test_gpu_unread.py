"""On a GPU, too, backward does not read the slots of the table (cswap/remat/unread.py)."""

from __future__ import annotations

import math

import pytest
import torch

from cswap.remat.unread import UNREAD
from tests.remat.test_unread import SAVE
from tests.remat.unread_slots import Slot

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SAVE)
def test_the_row_is_not_read(name, device):
    with device:  # for the indices, too
        x = torch.randn(2, 3, 7, 6, 5).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(Slot, Slot.unpack):
            y = SAVE[name](x)
    node = y.grad_fn
    while type(node).__name__ not in UNREAD:
        node = node.next_functions[0][0]
    slot = getattr(node, f"_raw_saved_{UNREAD[type(node).__name__]}").data
    seed = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, x, seed, retain_graph=True)
    slot.stand_in = torch.full_like(slot.tensor, math.nan)
    (found,) = torch.autograd.grad(y, x, seed)
    # Not bit by bit: kernels add up in an order by chance.
    torch.testing.assert_close(found, wanted)
