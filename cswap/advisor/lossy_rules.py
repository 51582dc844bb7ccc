"""How large an error each saved tensor forgives, under any options."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from cswap.codecs.tolerance import COARSE, EXACT, FINE

if TYPE_CHECKING:
    import torch

    from cswap.advisor.call_site import Site

LOSSY_MIN_BYTES: Final = 1024
"""Smaller tensors are means, scales and the like: an error there costs more than the bytes."""

_EXACT_KINDS: Final = ("*softmax*", "*router*", "*loss*", "*entropy*")
"""Module classes, lower case, whose saved tensors (inputs of losses) stay exact."""

_EXACT_PATHS: Final = ("*router*", "*.gate", "gate")
"""Module paths, lower case, of the routers of mixtures of experts."""

_EXACT_OPERATORS: Final = ("*softmax*", "*loss*", "*entropy*", "logsumexp", "kl_div")
"""Functions of the same kinds, for code without modules."""

_EXACT_PRODUCERS: Final = ("*Softmax*", "Tanh*", "Sigmoid*")
"""Autograd nodes whose outputs stay exact: probabilities, and outputs y whose backward takes 1 - y²
or y(1 - y). Where these are saturated, y is near 1, and a small error of y is a large one of that.
"""

_NORM: Final = ("*norm*",)
"""Module classes, lower case, and functions that save the input of a norm, and its statistics."""

_NORM_PRODUCERS: Final = ("*LayerNorm*", "*BatchNorm*", "*GroupNorm*", "*RmsNorm*")
"""Autograd nodes that give the output of a norm."""

_STATISTICS_PRODUCERS: Final = (
    "", "*Norm*", "*Mean*", "*Var*", "*Std*", "*Sqrt*", "*Rsqrt*", "*Sum*", "*Reciprocal*",
)  # fmt: skip
"""Autograd nodes whose outputs may be statistics. A leaf has none: it may be one that a norm saves
beside its input."""


def tolerance_of(tensor: torch.Tensor, site: Site) -> int:
    """How large an error training forgives in this tensor (docs/limits.md).

    Returns:
        A tolerance (`cswap.codecs.tolerance`).
    """
    if not tensor.is_floating_point() and not tensor.is_complex():
        return EXACT
    if tensor.nbytes < LOSSY_MIN_BYTES or tensor.element_size() == 1:
        return EXACT
    return _of_role(site.kind, site.scope, site.operator, site.producer)


@lru_cache(maxsize=4096)  # called for every tensor of every step
def _of_role(kind: str, path: str, operator: str, producer: str) -> int:
    kind = kind.lower()
    if (
        _any_match(kind, _EXACT_KINDS)
        or _any_match(path.lower(), _EXACT_PATHS)
        or _any_match(operator, _EXACT_OPERATORS)
        or _any_match(producer, _EXACT_PRODUCERS)
    ):
        return EXACT
    if _any_match(kind, _NORM) or _any_match(operator, _NORM):
        return EXACT if _any_match(producer, _STATISTICS_PRODUCERS) else FINE
    if _any_match(producer, _NORM_PRODUCERS):
        return FINE
    return EXACT if _any_match(producer, ("*Norm*Backward*",)) else COARSE


def _any_match(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)
