"""What backward reads of the tensors that operators of torch's database save: `reads_of`."""

from __future__ import annotations

import math
import os
import pickle
import warnings
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.remat.record import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)

ORDERS: Final = 3
"""Derivatives of so many orders are compared."""


class Slot:
    """The object that autograd holds instead of a tensor; ``stand_in`` comes back if it is set."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.stand_in: torch.Tensor | None = None

    def unpack(self) -> torch.Tensor:
        return self.tensor if self.stand_in is None else self.stand_in


@dataclass
class Reads:
    """How often backward gave the same gradients with other values in a slot, and how often not."""

    same: int = 0
    differ: int = 0


Found = defaultdict[tuple[str, str], Reads]
"""By name of the node and of its saved argument."""


def differentiable(names: Callable[[str], bool] = lambda _: True) -> list[Any]:
    """Operators of torch's database, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if op.supports_autograd and names(op.name)]


def reads_of(op: Any, most: int, found: Found) -> None:
    """Note what an operator's backward reads.

    Args:
        op: of torch's database.
        most: samples of each dtype.
        found: gets the result.
    """
    for dtype in DTYPES:
        if not op.supports_dtype(dtype, "cpu"):
            continue
        samples = op.sample_inputs_func(op, torch.device("cpu"), dtype, True)
        for _, sample in zip(range(most), samples, strict=False):
            inputs = list(_leaves([sample.input, sample.args, sample.kwargs]))
            with suppress(RuntimeError, NotImplementedError, ValueError, IndexError):
                # Else it is an error sample, or there is nothing to differentiate.
                note_reads(lambda: op(sample.input, *sample.args, **sample.kwargs), inputs, found)  # noqa: B023


def reads_of_each(ops: Sequence[Any], most: int) -> Found:
    """The same for many operators, each in a process of its own: some take NaN for an index."""
    found: Found = defaultdict(Reads)
    for op in ops:
        out, into = os.pipe()
        child = os.fork()
        if not child:
            mine: Found = defaultdict(Reads)
            reads_of(op, most, mine)
            with os.fdopen(into, "wb") as file:
                pickle.dump(dict(mine), file)
            os._exit(0)
        os.close(into)
        with os.fdopen(out, "rb") as file:
            data = file.read()
        os.waitpid(child, 0)
        for key, reads in pickle.loads(data).items() if data else ():
            found[key].same += reads.same
            found[key].differ += reads.differ
    return found


def note_reads(
    function: Callable[[], Any],
    inputs: Sequence[torch.Tensor],
    found: Found,
    only: Collection[str] = (),
) -> None:
    """Note what the backward of a function reads.

    Args:
        function: runs operators.
        inputs: leaves of its graph.
        found: gets the result.
        only: names of nodes; none: all.
    """
    torch.default_generator.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(Slot, Slot.unpack):
        outputs = list(_leaves(function()))
    slots = [slot for slot in _slots(outputs) if not only or slot[0] in only]
    if not (inputs and outputs and slots):
        return
    wanted = _derivatives(outputs, inputs)
    for kind, name, slot in slots:
        slot.stand_in = torch.full_like(slot.tensor, math.nan)
        reads = found[kind, name]
        try:
            same = all(map(_same, _derivatives(outputs, inputs), wanted))
        except RuntimeError:  # a matrix of NaN has no decomposition, say
            same = False
        slot.stand_in = None
        reads.same += same
        reads.differ += not same


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return same_bits(a.detach().reshape(-1).contiguous(), b.detach().reshape(-1).contiguous())


def _leaves(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        if given.requires_grad:
            yield given
    elif isinstance(given, dict):
        yield from _leaves(list(given.values()))
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _leaves(one)


def _slots(outputs: Sequence[torch.Tensor]) -> Iterator[tuple[str, str, Slot]]:
    # Of floating point or complex numbers: others may be addresses.
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [below for below, _ in node.next_functions]
        for attribute in dir(node):
            if attribute.startswith("_raw_saved_"):
                raw = getattr(node, attribute)
                for one in raw if isinstance(raw, (list, tuple)) else (raw,):
                    slot = one.data
                    if isinstance(slot, Slot) and _is_number(slot.tensor):
                        yield type(node).__name__, attribute.removeprefix("_raw_saved_"), slot


def _is_number(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and tensor.numel() > 0
    return plain and (tensor.is_floating_point() or tensor.is_complex())


def _derivatives(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    # Of all orders, with respect to the inputs and to the gradients of the outputs.
    found: list[torch.Tensor | None] = []
    seeds = [_seed(output).requires_grad_() for output in outputs]
    of, given, by = list(outputs), seeds, list(inputs)
    for order in range(1, ORDERS + 1):
        last = order == ORDERS
        try:
            grads = torch.autograd.grad(
                of, by, given, create_graph=not last, retain_graph=True, allow_unused=True
            )
        except RuntimeError:
            if order == 1:
                raise
            break  # not differentiable so often
        found += grads
        of = [one for one in found[-len(by) :] if one is not None and one.requires_grad]
        given, by = [_seed(one) for one in of], [*inputs, *seeds]
        if not of:
            break
    return found


def _seed(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, like.numel() + 1).reshape(like.shape).cos().to(like.dtype)
