"""What must never be encoded lossily, and whether the options make sense together."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from cswap.advisor.pricing import static_codec
from cswap.codecs.base import takes
from cswap.codecs.layout import torch_dtype
from cswap.codecs.registry import get_codec
from cswap.display import shown
from cswap.errors import ConfigError
from cswap.schema.tensor import DTYPES

if TYPE_CHECKING:
    import torch

    from cswap.advisor.call_site import Site
    from cswap.codecs.base import Codec
    from cswap.config import SwapConfig
    from cswap.schema.plan import Plan

LOSSY_MIN_BYTES: Final = 1024
"""Smaller tensors are means, scales and the like: there is nothing to gain, much to lose."""

RELATIVE_ERROR: Final = {"bf16": 0.0017, "fp16": 0.0003, "int8": 0.0065, "fp8": 0.026, "int4": 0.1}
"""Relative root-mean-square error on normally distributed values (bench/results, "lossy error")."""

_LOSSLESS_KINDS: Final = ("*norm*", "*softmax*", "*router*", "*loss*", "*entropy*")
"""Module classes, lower case, whose saved tensors (inputs of norms and losses) stay exact."""

_LOSSLESS_PATHS: Final = ("*router*", "*.gate", "gate")
"""Module paths, lower case, of the routers of mixtures of experts."""

_LOSSLESS_OPERATORS: Final = ("*norm*", "*softmax*", "*loss*", "*entropy*", "logsumexp", "kl_div")
"""Functions, by the same argument, for code without modules."""

_LOSSLESS_PRODUCERS: Final = ("*Softmax*", "*Norm*Backward*")
"""Autograd nodes whose outputs stay exact: probabilities, and what norms save of themselves."""


def may_be_lossy(tensor: torch.Tensor, site: Site) -> bool:
    """Whether an error in this tensor is one that training forgives (docs/limits.md)."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return False
    if tensor.nbytes < LOSSY_MIN_BYTES or tensor.element_size() == 1:
        return False
    return _role_allows(site.kind, site.scope, site.operator, site.producer)


@lru_cache(maxsize=4096)  # asked for every tensor of every step
def _role_allows(kind: str, path: str, operator: str, producer: str) -> bool:
    return not (
        _any_match(kind.lower(), _LOSSLESS_KINDS)
        or _any_match(path.lower(), _LOSSLESS_PATHS)
        or _any_match(operator, _LOSSLESS_OPERATORS)
        or _any_match(producer, _LOSSLESS_PRODUCERS)
    )


def _any_match(name: str, patterns: tuple[str, ...]) -> bool:
    return bool(name) and any(fnmatchcase(name, p) for p in patterns)


def lossy_candidates(lossy: str | float) -> tuple[str, ...]:
    """Names of the lossy codecs that the option ``lossy`` admits."""
    if lossy in ("off", "zfp"):  # zfp's rate is the policy's to choose
        return ()
    if isinstance(lossy, str):
        names: tuple[str, ...] = (lossy,)
    else:
        names = tuple(n for n, error in RELATIVE_ERROR.items() if error <= lossy)
    sparse = tuple(f"zvc+{n}" for n in names if n in ("int8", "fp8", "int4"))
    return names + sparse


def may_use_lossy(config: SwapConfig, plan: Plan | None) -> bool:
    """Whether any tensor could be encoded lossily under these options."""
    option = config.codec
    if config.lossy != "off" or callable(option):
        return True
    names = list(option.values()) if isinstance(option, dict) else [option]
    names += [d.codec for d in plan.decisions.values() if d.codec] if plan else []
    names += [static_codec(config.policy) or "auto"]
    return any(n != "auto" and not get_codec(str(n)).lossless for n in names)


def check(config: SwapConfig, plan: Plan | None) -> None:
    """Refuse options that cannot mean anything, before anything runs.

    Raises:
        ConfigError: an unknown codec; ``lossy`` with a codec for integers only; a lossy codec
            named for integers; and so on, each naming what was given and what is allowed.
    """
    if config.spill_limit is not None and config.spill_dir is None:
        raise ConfigError(f"spill_limit={config.spill_limit}: needs spill_dir as well.")
    if config.lossy == "zfp" and config.policy != "cswap+":
        raise ConfigError(
            f"lossy='zfp' with policy={shown(config.policy)}: only policy='cswap+' chooses its "
            "rate. Name a rate with codec='zfp:RATE'."
        )
    static = static_codec(config.policy)
    if static is not None:
        get_codec(static)
    if isinstance(config.codec, str) and config.codec != "auto":
        codec = get_codec(config.codec)
        takes_floats = any(_takes(codec, n) for n in ("float32", "bfloat16", "float16"))
        if config.lossy != "off" and not takes_floats:
            raise ConfigError(
                f"lossy={config.lossy!r} with codec={config.codec!r}: that codec takes no floating "
                "point tensors, so nothing would be lossy. Use codec='auto', or lossy='off'."
            )
    if isinstance(config.codec, dict):
        for key, name in config.codec.items():
            _check_entry(_dtype_name(key), key, name)
    for position, decision in (plan.decisions if plan else {}).items():
        if decision.codec is not None and decision.codec != "auto":
            try:
                get_codec(decision.codec)
            except ConfigError as error:
                raise ConfigError(f"plan.decisions[{position}]: {error}") from error


def _dtype_name(key: object) -> str:
    return str(key).removeprefix("torch.")


def _check_entry(dtype: str, key: object, name: str) -> None:
    if name == "auto":
        return
    codec = get_codec(name)
    if dtype in DTYPES and not _takes(codec, dtype):
        why = "is lossy: never for integers" if not codec.lossless else "does not take that dtype"
        raise ConfigError(f"codec={{{key!r}: {name!r}}}: {name!r} {why}. See `cswap codecs`.")


def _takes(codec: Codec, dtype: str) -> bool:
    # On any kind of device: which one the tensors are on is not known yet.
    return any(takes(codec, torch_dtype(dtype), device) for device in ("cpu", "cuda"))
