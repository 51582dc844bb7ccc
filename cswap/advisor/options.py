"""Checks of the options of the advisor: unknown names, and options that contradict each other."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from cswap.advisor.candidates import FIXED_RATE, lossy_names
from cswap.codecs.base import takes
from cswap.codecs.layout import torch_dtype
from cswap.codecs.registry import get_codec
from cswap.config import SLOWDOWN
from cswap.display import MOST_SHOWN, shown
from cswap.errors import ConfigError, UnknownCodecError
from cswap.schema.tensor import DTYPES

if TYPE_CHECKING:
    from cswap.codecs.base import Codec
    from cswap.config import SwapConfig
    from cswap.schema.plan import Plan


LOSSY_PATIENCE: Final = 2.0
"""Factor of the price of a byte with a lossy codec and without ``slowdown``: bytes matter more."""


POLICIES: Final = ("auto", "cswap+", "raw", "static:CODEC")
"""Values of the option ``policy``."""


def static_codec(policy: str) -> str | None:
    """CODEC of ``static:CODEC``, "raw" of ``raw``; None for other values of the option ``policy``.

    >>> static_codec("static:zvc"), static_codec("raw"), static_codec("auto")
    ('zvc', 'raw', None)
    """
    kind, colon, codec = policy.partition(":")
    return codec if kind == "static" and colon else "raw" if policy == "raw" else None


def decided_by(config: SwapConfig) -> str | None:
    """The first option that decides which tensors leave, so that no limit of time does; or None."""
    for name in ("policy", "codec"):
        if getattr(config, name) != "auto":
            return name
    names = ("plan", "budget", "host_limit", "spill_dir")
    return next((name for name in names if getattr(config, name) is not None), None)


def patience_of(config: SwapConfig) -> float:
    """Factor of the price of a byte, by ``slowdown`` and ``lossy``; at least 1.

    A user who allows swapping three times as much time as by default pays three times as much time
    for a byte. One who allows a lossy codec and says nothing of time pays `LOSSY_PATIENCE` times as
    much; an explicit ``slowdown`` counts alone.
    """
    if config.fit is not None:
        return 1.0
    if config.slowdown is None:
        return 1.0 if config.lossy == "off" else LOSSY_PATIENCE
    return max(1.0, (config.slowdown - 1) / (SLOWDOWN - 1))


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
    """Refuse options that contradict each other, before anything runs.

    Raises:
        ConfigError: an unknown codec; ``lossy`` with a codec for integers only; a lossy codec
            named for integers; and the like. The message names the value and the remedy.
    """
    _check_slowdown(config)
    _check_lossy(config)
    _check_policy(config.policy)
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


def _check_policy(policy: str) -> None:
    static = static_codec(policy)
    if static is not None:
        get_codec(static)
    elif policy not in POLICIES:
        close = difflib.get_close_matches(policy, POLICIES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"policy={shown(policy)}: must be one of {', '.join(POLICIES)}.{hint}")


def _check_slowdown(config: SwapConfig) -> None:
    name = decided_by(config)
    if config.slowdown is not None and config.fit is None and name is not None:
        raise ConfigError(
            f"slowdown={config.slowdown} with {name}={shown(getattr(config, name))}: that option "
            f"says what has to leave, whatever it takes. Leave slowdown or {name} out."
        )


def _check_lossy(config: SwapConfig) -> None:
    name = config.lossy
    if name == FIXED_RATE and config.policy != "cswap+":
        raise ConfigError(
            f"lossy='{FIXED_RATE}' with policy={shown(config.policy)}: only policy='cswap+' "
            f"chooses its rate. Name a rate with codec='{FIXED_RATE}:RATE'."
        )
    if not isinstance(name, str) or name in ("off", FIXED_RATE):
        return
    try:
        codec = get_codec(name)
    except UnknownCodecError:
        known = lossy_names()
        close = difflib.get_close_matches(name[:MOST_SHOWN], known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"lossy={shown(name)}: must be one of {', '.join(known)}, or a relative error such as "
            f"0.01.{hint}"
        ) from None
    if codec.lossless:
        raise ConfigError(
            f"lossy={shown(name)}: that codec is lossless. Use one of {', '.join(lossy_names())}."
        )
    if codec.traits.predicted_ratio is None:
        raise ConfigError(
            f"lossy={shown(name)}: codec='auto' cannot predict its ratio. Name it with "
            f"codec={shown(name)}."
        )


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
    # On any kind of device: the tensors' device is not known yet.
    return any(takes(codec, torch_dtype(dtype), device) for device in ("cpu", "cuda"))
