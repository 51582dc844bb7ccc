"""Tensors that are never encoded lossily, under any options."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from cswap.advisor.call_site import Site

LOSSY_MIN_BYTES: Final = 1024
"""Smaller tensors are means, scales and the like: an error there costs more than the bytes."""

_LOSSLESS_KINDS: Final = ("*norm*", "*softmax*", "*router*", "*loss*", "*entropy*")
"""Module classes, lower case, whose saved tensors (inputs of norms and losses) stay exact."""

_LOSSLESS_PATHS: Final = ("*router*", "*.gate", "gate")
"""Module paths, lower case, of the routers of mixtures of experts."""

_LOSSLESS_OPERATORS: Final = ("*norm*", "*softmax*", "*loss*", "*entropy*", "logsumexp", "kl_div")
"""Functions of the same kinds, for code without modules."""

_LOSSLESS_PRODUCERS: Final = ("*Softmax*", "*Norm*Backward*")
"""Autograd nodes whose outputs stay exact: probabilities, and statistics of norms."""


def may_be_lossy(tensor: torch.Tensor, site: Site) -> bool:
    """Whether training tolerates an error in this tensor (docs/limits.md)."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return False
    if tensor.nbytes < LOSSY_MIN_BYTES or tensor.element_size() == 1:
        return False
    return _role_allows(site.kind, site.scope, site.operator, site.producer)


@lru_cache(maxsize=4096)  # called for every tensor of every step
def _role_allows(kind: str, path: str, operator: str, producer: str) -> bool:
    return not (
        _any_match(kind.lower(), _LOSSLESS_KINDS)
        or _any_match(path.lower(), _LOSSLESS_PATHS)
        or _any_match(operator, _LOSSLESS_OPERATORS)
        or _any_match(producer, _LOSSLESS_PRODUCERS)
    )


def _any_match(name: str, patterns: tuple[str, ...]) -> bool:
    return bool(name) and any(fnmatchcase(name, p) for p in patterns)
