"""Names of codecs: built-in codecs, codecs of other packages, and compositions ``a+b``.

A name is ``family``, ``family:parameter`` (an integer, such as the rate of ``zfp:12``), or two of
these joined by ``+`` (see compose.py). A codec's module is imported when the codec is first used.
"""

from __future__ import annotations

import importlib
import re
import threading
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Final

from cswap.codecs.base import Codec
from cswap.codecs.traits import CodecTraits
from cswap.display import shown, visible
from cswap.errors import ConfigError, UnknownCodecError
from cswap.log import log
from cswap_kernels.unwatched import unwatched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Factory = Callable[..., Codec]

ENTRY_POINT_GROUP: Final = "cswap.codecs"


_BUILT_IN: Final = {
    "raw": "cswap.codecs.raw:Raw",
    "zvc": "cswap.codecs.sparse:Zvc",
    "csr": "cswap.codecs.sparse:Csr",
    "rle": "cswap.codecs.sparse:Rle",
    "bitpack": "cswap.codecs.bitpack:Bitpack",
    "expk": "cswap.codecs.expk:Expk",
    "lz4": "cswap.codecs.host:Lz4",
    "zstd": "cswap.codecs.host:Zstd",
    "bf16": "cswap.codecs.lossy:CastBfloat16",
    "fp16": "cswap.codecs.lossy:CastFloat16",
    "int8": "cswap.codecs.lossy:Int8",
    "fp8": "cswap.codecs.lossy:Fp8",
    "mxfp8": "cswap.codecs.lossy:Mxfp8",
    "int4": "cswap.codecs.lossy:Int4",
    "zfp": "cswap.codecs.zfp:Zfp",
}
"""Built-in codecs by family, ``module:class``: one line per codec."""

NVCOMP: Final = tuple(
    f"nvcomp-{name}"
    for name in (
        *("ans", "bitcomp", "bitcomp-lossy", "bitcomp-sparse", "cascaded"),
        *("deflate", "gdeflate", "lz4", "snappy", "zstd"),
    )
)
"""Codecs that need a GPU and NVIDIA's library. `list_codecs` omits them elsewhere."""

COMPOSITES: Final = ("zvc+expk", "zvc+int8", "zvc+fp8")
"""Compositions that `list_codecs` shows. `compositions` has all."""

MOST_PARTS: Final = 8
"""Most ``+`` in a name: each is resolved by recursion."""

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,8}")

# Reentrant: `get_codec` holds it while it makes a composition, which calls `get_codec` again.
_lock = threading.RLock()
_registered: dict[str, Factory] = {}
_made: dict[str, Codec] = {}
_warned: set[str] = set()


def register_codec(name: str, factory: Factory) -> None:
    """Make a codec of another package available under ``name``, in this process.

    Args:
        name: without ``+`` and ``:``; must not be in use.
        factory: called without arguments, or with the integer of ``name:parameter``.

    Raises:
        ConfigError: the name is malformed or taken.
    """
    if not name or "+" in name or ":" in name or name != name.strip().lower():
        raise ConfigError(
            f"name={shown(name)}: must be lower case, without '+', ':' or spaces around."
        )
    with _lock:
        if name in _factories():
            raise ConfigError(f"name={shown(name)}: a codec of that name exists; choose another.")
        _registered[name] = factory


def list_codecs() -> list[str]:
    """Names that `get_codec` takes, sorted: all families, and some compositions."""
    from cswap.codecs.nvcomp_library import missing

    absent = NVCOMP if missing() else ()
    return sorted({*_factories(), *COMPOSITES}.difference(absent))


def installed_codecs() -> list[Codec]:
    """One codec per family that can be made here, without parameters; nvCOMP's are left out.

    To make nvCOMP's would load NVIDIA's library, see `cswap.advisor.candidates.nvcomp_candidates`.
    A codec of another package that cannot be made is left out with one warning.
    """
    found = []
    for name in _factories():
        if name in NVCOMP:
            continue
        try:
            found.append(get_codec(name))
        except Exception as error:
            _warn_once(name, error)
    return found


def compositions(codecs: Iterable[Codec]) -> list[str]:
    """Names of the compositions ``zvc+X`` for these codecs X, in the same order."""
    module = unwatched(importlib.import_module, "cswap.codecs.compose")
    zvc = get_codec(module.FIRST)
    return [
        f"{zvc.name}+{codec.name}"
        for codec in codecs
        if module.why_not_composed(zvc, codec) is None
    ]


def get_codec(name: str) -> Codec:
    """The codec of that name; the same object every time.

    Raises:
        UnknownCodecError: no such codec.
        ConfigError: a wrong parameter, a composition that is not possible, or a codec whose
            package is missing (the message says which to install).
    """
    if not isinstance(name, str):
        known = visible(", ".join(list_codecs()))
        raise ConfigError(f"codec={shown(name)}: must be a name. Known: {known}.")
    if name.count("+") > MOST_PARTS:
        raise UnknownCodecError(name, list_codecs())
    with _lock:
        if name not in _made:
            _made[name] = _make(name)
        return _made[name]


def _make(name: str) -> Codec:
    first, plus, second = name.partition("+")
    if not plus:
        return _family(name, name)
    return _composed(_family(first, name), get_codec(second))


def _composed(first: Codec, second: Codec) -> Codec:
    module = unwatched(importlib.import_module, "cswap.codecs.compose")
    reason = module.why_not_composed(first, second)
    if reason is not None:
        known = ", ".join(compositions(installed_codecs()))
        raise ConfigError(f"codec='{first.name}+{second.name}': {reason}. Use one of {known}.")
    made: Codec = module.ZvcPlus(first, second)
    return made


def _family(part: str, whole: str) -> Codec:
    family, colon, parameter = part.partition(":")
    factory = _factories().get(family)
    if factory is None:
        raise UnknownCodecError(whole, list_codecs())
    if not colon:
        return _checked(factory(), whole)
    # One spelling per codec: int() also takes "+8", "0_8", " 8" and digits of other scripts.
    if not _INTEGER.fullmatch(parameter):
        raise ConfigError(
            f"codec={shown(whole)}: {shown(parameter)} must be an integer, such as 8."
        )
    try:
        made = factory(int(parameter))
    except TypeError as error:
        raise ConfigError(f"codec={shown(whole)}: {family!r} takes no parameter.") from error
    return _checked(made, whole)


def _checked(made: object, name: str) -> Codec:
    if not isinstance(made, Codec):
        raise ConfigError(f"codec={name!r}: its factory made {shown(made)}, which is no Codec.")
    if not isinstance(made.traits, CodecTraits):
        raise ConfigError(f"codec={name!r}: traits={shown(made.traits)}: must be CodecTraits.")
    return made


def _warn_once(name: str, error: Exception) -> None:
    # No warning for a built-in codec whose package is not installed.
    if name in _BUILT_IN or name in _warned:
        log.debug("codec %r cannot be made: %s", name, error)
        return
    _warned.add(name)
    log.warning("codec %r cannot be made and is not considered: %s", name, error)


def _factories() -> dict[str, Factory]:
    with _lock:
        found: dict[str, Factory] = {name: _lazy(target) for name, target in _BUILT_IN.items()}
        found |= {name: _lazy("cswap.codecs.nvcomp:make", name) for name in NVCOMP}
        for name, factory in _entry_points().items():
            found.setdefault(name, factory)
        found.update(_registered)
        return found


@lru_cache(maxsize=1)
def _entry_points() -> dict[str, Factory]:
    return {p.name: _foreign(p) for p in metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _foreign(point: metadata.EntryPoint) -> Factory:
    def load(*parameter: int) -> Codec:
        try:
            factory = unwatched(point.load)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"codec={point.name!r}: its entry point {point.value!r} cannot be loaded: {error}."
            ) from error
        made: Codec = factory(*parameter)
        return made

    return load


def _lazy(target: str, *first: str) -> Factory:
    def load(*parameter: int) -> Codec:
        module, _, name = target.partition(":")
        made: Codec = getattr(unwatched(importlib.import_module, module), name)(*first, *parameter)
        return made

    return load
