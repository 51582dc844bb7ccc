"""Several ranks: processes that train one model together, through `torch.distributed`.

Note [ranks that agree]
~~~~~~~~~~~~~~~~~~~~~~~
Tensor parallelism and its relatives compute some tensors on every rank, and rely on equal
gradients of the parameters behind them. A lossy codec that one rank chooses and another does not
would let these parameters drift apart, unseen. So where there are several ranks and lossy codecs
are admitted, choices follow the rule of deterministic algorithms: they depend on the tensors'
values and on the order of the step, and on no measured time. Ranks with equal tensors then choose
alike.

Note [no collective of ours]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A collective that one rank starts and another does not blocks both. cswap starts none. The accuracy
guard runs no module again in whose forward a collective starts: ranks decide for themselves, and
one would run the module again alone. Modules that the user names to be recomputed run again on
every rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from cswap.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


def are_several() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def must_agree(*, lossy: bool) -> bool:
    """Whether choices may depend on values and their order alone. See Note [ranks that agree].

    Args:
        lossy: whether a lossy codec may come of the choice; other choices change no value.
    """
    return torch.are_deterministic_algorithms_enabled() or (lossy and are_several())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: of a DTensor, the tensor in its memory; of others, itself."""
    # Known by its name: DTensor takes long to import, and other subclasses may raise anything.
    if type(tensor).__name__ != "DTensor":
        return tensor
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # noqa: SLF001
    return part


def without_collectives() -> AbstractContextManager[object]:
    """Refuses collectives and messages between ranks, before they begin, inside the ``with``.

    It raises UnsupportedError there. It does nothing where there is one rank.
    """
    return _NoCollectives() if are_several() else nullcontext()  # type: ignore[no-untyped-call]


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise UnsupportedError(f"it takes part in a collective ({func})")
        run: Callable[..., Any] = func
        return run(*args, **(kwargs or {}))
