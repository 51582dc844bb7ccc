"""Autograd's error for a saved tensor that was modified in place: `modified_error`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def modified_error(tensor: torch.Tensor, sizes: Sequence[int], expected: int) -> RuntimeError:
    """Autograd's error for a saved tensor that was modified in place, in its own words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(sizes)}] is at version {tensor._version}; "  # noqa: SLF001
        f"expected version {expected} instead. Hint: enable anomaly detection to find the "
        "operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
