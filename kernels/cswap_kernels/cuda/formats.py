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

_ALL_WORDS: Final = (1, 2, 4, 8)

FORMATS: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(("zvc", "csr", "rle", "bitpack", "zvc+rle", "zvc+bitpack"), _ALL_WORDS),
    "expk": (2, 4),
    "zvc+expk": (2, 4),
    **dict.fromkeys(("int8", "fp8", "mxfp8", "int4", "zfp"), (2, 4, 8)),
    **dict.fromkeys(("zvc+int8", "zvc+fp8", "zvc+mxfp8", "zvc+int4"), (2, 4, 8)),
    **dict.fromkeys(("cast", "zvc+cast"), (4, 8)),
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
    """(kernel, signature) of a format.

    Args:
        name: a key of `FORMATS`.
        word: bytes per word, one of the format's.
        direction: "encode" or "decode".
    """
    if name == "zfp":
        from cswap_kernels.cuda.zfp import zfp_kernel

        return zfp_kernel(word, direction)
    if direction == "encode":
        return encode_kernel(_maker(name), word), encode_signature(word)
    return decode_kernel(_maker(name), word), decode_signature(word)
