"""The rows of a node's operator, and of the views before it: `Rows`."""

from __future__ import annotations

from typing import Any

import torch

from cswap.remat.operator import Operator
from cswap.remat.operators import RESULT_SLOTS, operator_of
from cswap.remat.upstream import oldest_edge
from cswap.remat.views import View, view_of


class Rows:
    """The rows of nodes in the tables of operators and of views."""

    def __init__(self, *, products: bool) -> None:
        """Args: products: see `operator_of`."""
        self._products = products
        self._rows: dict[type, Operator | View | None] = {}

    def of(self, node: Any) -> Operator | View | None:
        """The row of a node; None: its operator does not run again."""
        # Every C++ node of a derivative formula has a Python type of its own, with its name.
        kind = type(node)
        try:
            return self._rows[kind]
        except KeyError:
            pass
        if issubclass(kind, torch.autograd.function.BackwardCFunction):  # a user's; may be freed
            return None
        name = kind.__name__
        row = self._rows[kind] = operator_of(kind, products=self._products) or view_of(name)
        return row

    def is_hopeless(self, node: Any, row: Operator | View) -> bool:
        """Whether an unsaved argument comes from a node that cannot run again.

        This is checked before a search, because it holds for most tensors, such as sums of products
        and activations of products.
        """
        if isinstance(row, View):
            return self._is_lost(node.next_functions[0][0])
        edges = row.unsaved(node)
        if not edges or row.kind == "product":  # the bias may be absent
            return False
        below = node.next_functions
        lost = [edge for edge in edges if self._is_lost(below[edge][0])]
        if not lost:
            return False
        # Another operator may hold the older one of several arguments: see upstream.py.
        return len(edges) == 1 or len(lost) > 1 or lost[0] != oldest_edge(node, edges)

    def _is_lost(self, node: Any) -> bool:
        while node is not None:
            row = self.of(node)
            if row is None:
                name = type(node).__name__
                return name != "AccumulateGrad" and name not in RESULT_SLOTS
            if isinstance(row, Operator):
                return False
            node = node.next_functions[0][0]
        return True  # without a history
