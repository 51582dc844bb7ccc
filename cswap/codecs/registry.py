"""Names of codecs: a lazy table, other people's entry points, and ``a+b``.

A name is ``family``, ``family:parameter`` (an integer, such as the rate of ``zfp:12``), or two of
these joined by ``+`` (see compose.py).
"""

from __future__ import annotations

import importlib
import re
import threading
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Final

from cswap.codecs.base import Codec
from cswap.display import shown, visible
from cswap.errors import ConfigError, UnknownCodecError
from cswap_kernels.unwatched import unwatched

if TYPE_CHECKING:
    from collections.abc import Callable

    Factory = Callable[..., Codec]

ENTRY_POINT_GROUP: Final = "cswap.codecs"

_BUILT_IN: Final[dict[str, str]] = {
    "raw": "cswap.codecs.raw:Raw",
    "zvc": "cswap.codecs.zvc:Zvc",
    "csr": "cswap.codecs.csr:Csr",
    "rle": "cswap.codecs.rle:Rle",
    "bitpack": "cswap.codecs.bitpack:Bitpack",
    "expk": "cswap.codecs.expk:Expk",
    "lz4": "cswap.codecs.host:Lz4",
    "zstd": "cswap.codecs.host:Zstd",
    "bf16": "cswap.codecs.cast:CastBfloat16",
    "fp16": "cswap.codecs.cast:CastFloat16",
    "int8": "cswap.codecs.int8:Int8",
    "fp8": "cswap.codecs.fp8:Fp8",
    "mxfp8": "cswap.codecs.mxfp8:Mxfp8",
    "int4": "cswap.codecs.int4:Int4",
    "zfp": "cswap.codecs.zfp:Zfp",
}
"""Family to ``module:class``, imported on first use."""

NVCOMP: Final[dict[str, str]] = {
    "nvcomp-ans": "cswap.codecs.nvcomp:Ans",
    "nvcomp-bitcomp": "cswap.codecs.nvcomp:Bitcomp",
    "nvcomp-bitcomp-lossy": "cswap.codecs.nvcomp:BitcompLossy",
    "nvcomp-bitcomp-sparse": "cswap.codecs.nvcomp:BitcompSparse",
    "nvcomp-cascaded": "cswap.codecs.nvcomp:Cascaded",
    "nvcomp-deflate": "cswap.codecs.nvcomp:Deflate",
    "nvcomp-gdeflate": "cswap.codecs.nvcomp:GDeflate",
    "nvcomp-lz4": "cswap.codecs.nvcomp:Lz4",
    "nvcomp-snappy": "cswap.codecs.nvcomp:Snappy",
    "nvcomp-zstd": "cswap.codecs.nvcomp:Zstd",
}
"""Likewise. They need a GPU and a library of NVIDIA's; without, `list_codecs` leaves them out."""

COMPOSITES: Final = ("zvc+expk", "zvc+int8", "zvc+fp8")
"""Compositions that `list_codecs` shows; `get_codec` takes more (see compose.py)."""

MOST_PARTS: Final = 8
"""``+`` in a name: each is resolved by recursion."""

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]{0,8}")

_lock = threading.RLock()
_registered: dict[str, Factory] = {}
_made: dict[str, Codec] = {}


def register_codec(name: str, factory: Factory) -> None:
    """Make a codec of your own available under ``name``.

    Args:
        name: without ``+`` and ``:``; must be free.
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
    """Names that `get_codec` takes, sorted: families, and the usual compositions."""
    from cswap.codecs.nvcomp_library import missing

    absent = NVCOMP if missing() else ()
    return sorted({*_factories(), *COMPOSITES}.difference(absent))


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
    if plus:
        module = unwatched(importlib.import_module, "cswap.codecs.compose")
        made: Codec = module.compose(_family(first, name), get_codec(second))
        return made
    return _family(name, name)


def _family(part: str, whole: str) -> Codec:
    family, colon, parameter = part.partition(":")
    factory = _factories().get(family)
    if factory is None:
        raise UnknownCodecError(whole, list_codecs())
    if not colon:
        return _checked(factory(), whole)
    # One spelling per codec: int() would also take "+8", "0_8", " 8" and digits of other scripts.
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
    return made


def _factories() -> dict[str, Factory]:
    with _lock:
        built_in = {**_BUILT_IN, **NVCOMP}
        found: dict[str, Factory] = {n: _lazy(target) for n, target in built_in.items()}
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


def _lazy(target: str) -> Factory:
    def load(*parameter: int) -> Codec:
        module, _, name = target.partition(":")
        made: Codec = getattr(unwatched(importlib.import_module, module), name)(*parameter)
        return made

    return load
