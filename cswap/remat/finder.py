"""Finds the operators that compute a saved tensor again: `Finder`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.remat.reads import NotFoundError
from cswap.remat.record import Remat
from cswap.remat.search import Limits, Rows, Search, has_own_memory, is_result
from cswap.remat.settings import Settings

if TYPE_CHECKING:
    import torch

    from cswap.remat.reads import HoldLeaf, Keep
    from cswap.remat.record import Formula

DEFAULT_DEPTH: Final = 3
"""Largest number of operators in a row; recomputation must not cascade (a lesson of Coop, 2023)."""

DEFAULT_PASSES: Final = 24
"""Largest number of reads and writes of memory of the result's size."""


class Finder:
    """Examines tensors inside the pack hook. Its only state is its limits, so it is thread-safe."""

    def __init__(
        self,
        *,
        tolerance: int = 0,
        max_depth: int = DEFAULT_DEPTH,
        max_passes: int = DEFAULT_PASSES,
        products: bool = False,
        keep: Keep | None = None,
        hold: HoldLeaf | None = None,
    ) -> None:
        """A finder for one engine.

        Args:
            tolerance: of the tensors for errors (0: none): inputs forgive no larger ones.
            max_depth: largest number of operators in a row; each costs time at unpack.
            max_passes: largest number of reads and writes of memory of the tensor's size.
            products: whether matrix products and convolutions run again, too.
            keep: makes a packed object of a tensor that autograd holds itself, saved while no hooks
                were on; None: such tensors are no inputs.
            hold: holds a parameter instead of its cast; None: nobody does.
        """
        rows = Rows(products=products)
        self._limits = Limits(rows, tolerance, keep, hold, max_depth, max_passes)
        self._keep, self._hold = keep, hold

    def find(self, tensor: torch.Tensor, expected: Formula | None = None) -> Remat | None:
        """Find the operators that compute again the memory of a tensor that autograd is saving.

        A tensor whose operator cannot run again costs about a microsecond, because only the types
        of two nodes are read.

        Args:
            tensor: the argument of the pack hook, a plain `torch.Tensor`.
            expected: formula of the tensor that this call site saved before, found within the same
                limits. The result is the same with and without it; the right one makes it faster.

        Returns:
            None if the tensor has to be stored.
        """
        if expected is not None:
            remat = self.recognised(tensor, expected)
            if remat is not None:
                return remat
        base = tensor._base  # noqa: SLF001
        if base is None:
            base = tensor
        node = base.grad_fn
        if node is None:
            return None
        row = self._limits.rows.of(node)
        if row is None or self._limits.rows.is_hopeless(node, row):
            return None
        try:
            return Search(self._limits, base, node).remat(row)
        except (NotFoundError, AttributeError):  # nodes of other versions of torch may differ
            return None

    def recognised(self, tensor: torch.Tensor, formula: Formula) -> Remat | None:
        """The record of a tensor that this formula computes again; None: another may do.

        See Note [a formula is recognised] in recognition.py.

        Args:
            tensor: see `find`.
            formula: of a tensor that its call site saved before.
        """
        base = tensor._base  # noqa: SLF001
        if base is None:
            base = tensor
        node, layout = base.grad_fn, formula.layout
        if (
            type(node) is not formula.root
            or base._version != formula.version  # noqa: SLF001
            or layout.sizes != base.shape
            or layout.strides != base.stride()
            or layout.dtype is not base.dtype
            or layout.device != base.device
        ):
            return None
        try:
            if not has_own_memory(base):
                return None
            if base._version or base.output_nr:  # noqa: SLF001 - neither is, as a rule
                row = self._limits.rows.of(node)
                if row is None or not is_result(base, node, row):
                    return None
            settings = Settings.current(product=formula.product)
            found = formula.recognition.again(node, formula.nbytes, self._keep, self._hold)
        except (NotFoundError, AttributeError):
            return None
        if found is None:
            return None
        return Remat(formula, *found, settings)
