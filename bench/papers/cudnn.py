"""Converts a torch trace to the memory use of a framework on cuDNN, as in vDNN's figures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cswap.schema.trace import Trace


def as_cudnn(trace: Trace) -> Trace:
    """The trace without the memory that torch alone needs.

    cuDNN's pooling keeps no indices, its dropout no mask of torch's kind: integers and bools take
    no bytes. Branches write directly
    into the map that joins them: inputs of ``cat`` take none.
    """
    joined = {
        tensor
        for operator in trace.operators
        if operator.phase == "forward" and operator.name.rpartition(".")[2] == "cat"
        for tensor in operator.inputs
    }
    return replace(
        trace,
        tensors=tuple(
            replace(t, nbytes=0) if i in joined or not _is_float(t.dtype) else t
            for i, t in enumerate(trace.tensors)
        ),
    )


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))
