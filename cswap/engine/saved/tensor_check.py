"""Whether a tensor looks like an earlier one, by one call of torch's instead of ten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.log import log

if TYPE_CHECKING:
    from collections.abc import Callable


def check_of(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool] | None:
    """A function that says whether a tensor looks like this one, which it does not hold.

    It compares Python types, dispatch keys (layout, conjugation, subclasses of any kind), dtypes,
    devices, sizes, strides and ``requires_grad``: the guard that torch's compiler puts in front of
    compiled code. None: this torch has none.
    """
    return None if _GUARDS is None else _GUARDS(tensor)


def _guards() -> Callable[[torch.Tensor], Callable[[torch.Tensor], bool]] | None:
    # It is not public, so it is tried once.
    try:
        from torch._C._dynamo.guards import TensorGuards

        def make(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
            guards: Any = TensorGuards  # its stub knows other arguments
            guards = guards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            check: Callable[[torch.Tensor], bool] = guards.check
            return check

        x = torch.empty(2, 3, device="cpu")
        check = make(x)
        others = (x.t(), x.double(), x[:1], x.detach().requires_grad_(), torch.nn.Parameter(x))
        works = check(torch.empty_like(x)) is True and not any(check(other) for other in others)
    except Exception as error:
        log.info("torch has no guard for tensors (%s): each is asked for its properties.", error)
        return None
    return make if works else None


_GUARDS: Final = _guards()
