"""Operators that select rows of a table: of a graph's nodes, or of a parameter.

A graph net selects a row of its nodes for every edge; a recommender one of a table for every
category. The rows are saved for the operator after them. A table that is a parameter exists anyway
and is held as it is: Note [a parameter may change before backward] in engine/saved/leaves.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from cswap.remat.operator import Operand, Operator

if TYPE_CHECKING:
    from collections.abc import Sequence

_aten = torch.ops.aten

_TABLE: Final = Operand(None, 0, parameter=True)


def _index_select(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.index_select(x, dim, index)


def _gather(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.gather(x, dim, index)


def _embedding_bag(
    table: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    mode: int,
    padding_idx: int,
    sizes: Sequence[int],
) -> torch.Tensor:
    # The node does not say whether the last offset is the end of the last bag. There is no bag
    # for it then.
    ends = len(offsets) > sizes[0]
    found: torch.Tensor = _aten._embedding_bag.default(  # noqa: SLF001
        table, indices, offsets, False, mode, False, weights, ends, padding_idx
    )[0]
    return found


TABLES: Final[dict[str, Operator]] = {
    "IndexSelectBackward0": Operator(
        "index_select", _index_select, (_TABLE, Operand("index")), ("dim",), "copy"
    ),
    # It saves the table, too, but its values may be gone: unread.py.
    "GatherBackward0": Operator("gather", _gather, (_TABLE, Operand("index")), ("dim",), "copy"),
    "EmbeddingBackward0": Operator(
        "embedding", _aten.embedding.default, (_TABLE, Operand("indices")), (), "copy"
    ),
    "EmbeddingBagBackward0": Operator(
        "embedding_bag",
        _embedding_bag,
        (
            _TABLE,
            Operand("indices"),
            Operand("offsets"),
            Operand("per_sample_weights", optional=True),
        ),
        ("mode", "padding_idx"),
        "copy",
        "sizes",
    ),
}
"""Rows by the name of the autograd node."""
