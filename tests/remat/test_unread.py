"""The table of slots that backward does not read, with NaN in each slot of torch's operators."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from cswap.remat.reads import CAN_READ
from cswap.remat.unread import MOST_NODES, UNREAD, node_below, unread_slot
from tests.remat.unread_slots import Found, Reads, Slot, differentiable, note_reads, reads_of_each

pytestmark = [
    pytest.mark.skipif(not CAN_READ, reason="torch does not show what nodes have saved"),
    pytest.mark.filterwarnings("ignore"),
]

SAVE = {
    "AdaptiveAvgPool2D": lambda x: F.adaptive_avg_pool2d(x[0], 3),
    "AdaptiveAvgPool3D": lambda x: F.adaptive_avg_pool3d(x, 3),
    "AdaptiveMaxPool2D": lambda x: F.adaptive_max_pool2d(x[0], 3),
    "AdaptiveMaxPool3D": lambda x: F.adaptive_max_pool3d(x, 3),
    "AvgPool2D": lambda x: F.avg_pool2d(x[0], 2, ceil_mode=True),
    "AvgPool3D": lambda x: F.avg_pool3d(x, 2),
    "FractionalMaxPool2D": lambda x: F.fractional_max_pool2d(x[0], 2, output_size=3),
    "FractionalMaxPool3D": lambda x: F.fractional_max_pool3d(x, 2, output_size=3),
    "MaxPool2DWithIndices": lambda x: F.max_pool2d(x[0], 3, 2, padding=1),
    "MaxPool3DWithIndices": lambda x: F.max_pool3d(x, 2),
    "ReflectionPad1D": lambda x: F.pad(x[0, 0], (2, 1), "reflect"),
    "ReflectionPad2D": lambda x: F.pad(x[0], (2, 1, 0, 3), "reflect"),
    "ReflectionPad3D": lambda x: F.pad(x, (2, 1, 0, 3, 1, 1), "reflect"),
    "ReplicationPad1D": lambda x: F.pad(x[0, 0], (2, 1), "replicate"),
    "ReplicationPad2D": lambda x: F.pad(x[0], (2, 1, 0, 3), "replicate"),
    "ReplicationPad3D": lambda x: F.pad(x, (2, 1, 0, 3, 1, 1), "replicate"),
    "Gather": lambda x: x.gather(-1, torch.arange(4).expand(*x.shape[:-1], 4) % 3),
    "MaskedSelect": lambda x: x.masked_select(x.detach() > 0),
    "Take": lambda x: x.take(torch.tensor([7, 1, 7])),
    "Cummax": lambda x: x.cummax(-1)[0],
    "Cummin": lambda x: x.cummin(0)[0],
    "NllLoss": lambda x: F.nll_loss(x[0, 0, 0], torch.arange(6) % 5, torch.ones(5).to(x)),
    "NllLoss2D": lambda x: F.nll_loss(x[0], torch.arange(90).view(3, 6, 5) % 7),
    "IndexAdd": lambda x: torch.zeros_like(x).index_add(-2, torch.arange(x.shape[-2]) % 3, x),
    "IndexCopy": lambda x: torch.zeros_like(x).index_copy(-2, torch.arange(x.shape[-2]), x),
    "Put": lambda x: torch.zeros_like(x).put(torch.arange(x.numel()), x),
}
"""A call of each operator that saves an unread slot. Args: x: [2, 3, 7, 6, 5]."""

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last_3d),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


LIMITED = dict.fromkeys(
    ("NllLoss2D", "AvgPool3D", "FractionalMaxPool2D", "FractionalMaxPool3D"), (RuntimeError,)
)
"""Operators that do not take every layout and dtype, and what they raise then."""


def test_each_row_has_a_call():
    assert {f"{name}Backward0" for name in SAVE} == UNREAD.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rows_are_not_read(layout, dtype):
    for name, function in SAVE.items():
        x = LAYOUTS[layout](torch.randn(2, 3, 7, 6, 5).to(dtype)).requires_grad_()
        found: Found = defaultdict(Reads)
        slot = f"{name}Backward0", UNREAD[f"{name}Backward0"]
        with suppress(*LIMITED.get(name, ())):
            note_reads(lambda: function(x), [x], found, {slot[0]})  # noqa: B023
            assert found[slot] == Reads(same=1), slot


def test_a_slot_that_is_read_is_told():
    found: Found = defaultdict(Reads)
    x = torch.randn(3, requires_grad=True)
    note_reads(lambda: F.leaky_relu(x).cos(), [x], found)
    assert found == {
        ("LeakyReluBackward0", "self"): Reads(differ=1),
        ("CosBackward0", "self"): Reads(differ=1),
    }


NO_ROWS = {
    # As large as other saved tensors, but rare.
    *(("CdistBackward0", name) for name in ("x1", "x2", "result")),
    *(("ComplexBackward0", name) for name in ("real", "imag")),
    *(("DivBackward2", name) for name in ("self", "other")),  # rounds: no gradient
    *(("SparseSampledAddmmBackward0", name) for name in ("mat1", "mat2")),
    ("CholeskySolveBackward0", "self"),
    ("FftR2CBackward0", "self"),
    ("OrmqrBackward0", "input3"),
    ("TriangularSolveBackward0", "self"),
    # Saved in a backward.
    ("NativeDropoutBackwardBackward0", "grad_output"),
    ("SoftmaxBackwardDataBackward0", "grad_output"),
    # Small.
    *(("BatchNormWithUpdateBackward0", f"running_{name}") for name in ("mean", "var")),
    ("NativeLayerNormBackward0", "bias"),
}
"""Slots that no sample's backward reads, and that are no rows; of torch 2.13."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_of_every_operator_the_rows_are_not_read():
    """Nor are others that could become rows, but for these."""
    pytest.importorskip("expecttest", reason="PyTorch's operator tests need expecttest")
    found, rows = reads_of_each(differentiable(), most=12), set(UNREAD.items())
    assert rows <= found.keys()
    assert {row: found[row] for row in rows if found[row].differ or not found[row].same} == {}
    assert {key for key in found.keys() - rows if not found[key].differ} <= NO_ROWS


def test_no_function_of_a_user_has_the_name_of_a_row():
    class GatherBackward0(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

    x = torch.randn(8, requires_grad=True)
    assert type(GatherBackward0.apply(x).grad_fn).__name__ == "GatherBackward0Backward"
    assert unread_slot(None, x) is None


def test_only_the_object_in_the_slot_counts():
    x, index = torch.randn(4, 5, requires_grad=True), torch.zeros(4, 5, dtype=torch.long)
    packed: list[Slot] = []

    def pack(tensor: torch.Tensor) -> Slot:
        packed.append(Slot(tensor))
        return packed[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, Slot.unpack):
        y = torch.gather(x, 1, index)
    of_index, of_self = packed
    assert unread_slot(y.grad_fn, of_self) == "_raw_saved_self"
    assert unread_slot(y.grad_fn, of_index) is None
    assert unread_slot(y.grad_fn, Slot(x)) is None
    y.sum().backward()
    assert unread_slot(y.grad_fn, of_self) is None  # it was freed


def test_the_node_with_a_number_is_found_among_those_that_made_a_tensor():
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    number = torch._C._autograd._get_sequence_nr() - 1
    for _ in range(MOST_NODES // 2):
        last = y.sin()
        y = y + last
    newest = torch._C._autograd._get_sequence_nr() - 1
    assert node_below(y, number, newest) is None  # it looks at fewer nodes
    assert node_below(last, newest - 1, newest) is last.grad_fn
    z = (x * 2).relu()
    newest = torch._C._autograd._get_sequence_nr() - 1
    assert node_below(z, newest, newest) is z.grad_fn
    assert type(node_below(z, newest - 1, newest)).__name__ == "MulBackward0"
    assert node_below(x, newest, newest) is None
    assert node_below(z * 1, newest - 1, newest) is None  # newer than the newest
