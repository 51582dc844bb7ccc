"""Every format that has a CUDA twin, and its kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from cswap_kernels.cuda.container import (
    decode_kernel,
    decode_signature,
    encode_kernel,
    encode_signature,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap_kernels.cuda.container import MakeTile

ALL_WORDS: Final = (1, 2, 4, 8)
_FLOATS: Final = (2, 4, 8)
_WIDE: Final = (4, 8)

FORMATS: Final[dict[str, tuple[int, ...]]] = {
    "zvc": ALL_WORDS,
    "csr": ALL_WORDS,
    "rle": ALL_WORDS,
    "bitpack": ALL_WORDS,
    "expk": _FLOATS,
    "cast": _WIDE,
    "int8": _FLOATS,
    "fp8": _FLOATS,
    "mxfp8": _FLOATS,
    "int4": _FLOATS,
    "zfp": _FLOATS,
    "zvc+rle": ALL_WORDS,
    "zvc+int4": _FLOATS,
    "zvc+bitpack": ALL_WORDS,
    "zvc+cast": _WIDE,
    "zvc+expk": _FLOATS,
    "zvc+fp8": _FLOATS,
    "zvc+int8": _FLOATS,
    "zvc+mxfp8": _FLOATS,
}
"""Bytes of the words that a format is for. The module X of this package has the function X_tile
(word, as_words) -> (measure, write, decode), see container.py; ``zfp`` has no tiles."""


def _maker(name: str) -> MakeTile:
    first, _, second = name.partition("+")
    if second:
        from cswap_kernels.cuda.zvc_plus import zvc_plus

        return zvc_plus(_maker(second))
    found: MakeTile = getattr(import_module(f"cswap_kernels.cuda.{first}"), f"{first}_tile")
    return found


def kernel(name: str, word: int, direction: str) -> tuple[Callable[..., None], Any]:
    """(kernel, signature) of a format, or of the profiler.

    Args:
        name: a key of `FORMATS`, or "profile".
        word: bytes per word, one of the format's.
        direction: "encode" or "decode"; "sample" for the profiler.
    """
    if name == "profile":
        from cswap_kernels.cuda.profile import profile_kernel, profile_signature

        return profile_kernel(word), profile_signature(word)
    if name == "zfp":
        from cswap_kernels.cuda.zfp import zfp_kernel

        return zfp_kernel(word, direction)
    if direction == "encode":
        return encode_kernel(_maker(name), word), encode_signature(word)
    return decode_kernel(_maker(name), word), decode_signature(word)
