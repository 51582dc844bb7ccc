"""Operators that select rows of a table: of a graph's nodes, or of a parameter.

A graph net selects a row of its nodes for every edge; a recommender one of a table for every
category. The rows are saved for the operator after them. A table that is a parameter exists anyway
and is held as it is: Note [a parameter may change before backward] in engine/saved/leaves.py.
"""

from __future__ import annotations

from typing import Final

import torch

from cswap.remat.operator import Operand, Operator

_TABLE: Final = Operand(None, 0, parameter=True)


def _index_select(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.index_select(x, dim, index)


TABLES: Final[dict[str, Operator]] = {
    "IndexSelectBackward0": Operator(
        "index_select", _index_select, (_TABLE, Operand("index")), ("dim",), "copy"
    ),
}
"""Rows by the name of the autograd node."""
