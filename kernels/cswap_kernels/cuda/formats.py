"""Every format that has a CUDA twin: where its device tile functions are made."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from cswap_kernels.cuda.container import (
    decode_kernel,
    decode_signature,
    encode_kernel,
    encode_signature,
)
from cswap_kernels.cuda.profile import profile_kernel, profile_signature

if TYPE_CHECKING:
    from collections.abc import Callable

ALL_WORDS: Final = (1, 2, 4, 8)
FLOAT_WORDS: Final = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table.

    Attributes:
        module: in this package.
        maker: name of its function (word, as_words) -> (measure, write, decode).
        words: word sizes in bytes that it is for.
        standalone: no tile container: the maker is (word, direction) -> (kernel, signature).
    """

    module: str
    maker: str
    words: tuple[int, ...] = ALL_WORDS
    standalone: bool = False

    def make(self) -> Callable[[int, Any], Any]:
        """The maker."""
        found: Callable[[int, Any], Any] = getattr(
            import_module(f"cswap_kernels.cuda.{self.module}"), self.maker
        )
        return found


FORMATS: Final[dict[str, Format]] = {
    "zvc": Format("zvc", "zvc_tile"),
    "csr": Format("csr", "csr_tile"),
    "rle": Format("rle", "rle_tile"),
    "bitpack": Format("bitpack", "bitpack_tile"),
    "expk": Format("expk", "expk_tile", FLOAT_WORDS),
    "cast": Format("cast", "cast_tile", (4, 8)),
    "int8": Format("int8", "int8_tile", FLOAT_WORDS),
    "fp8": Format("fp8", "fp8_tile", FLOAT_WORDS),
    "mxfp8": Format("fp8", "mxfp8_tile", FLOAT_WORDS),
    "int4": Format("int4", "int4_tile", FLOAT_WORDS),
    "zfp": Format("zfp", "zfp_kernel", FLOAT_WORDS, standalone=True),
    "zvc+rle": Format("zvc_plus", "zvc_rle_tile"),
    "zvc+int4": Format("zvc_plus", "zvc_int4_tile", FLOAT_WORDS),
    "zvc+bitpack": Format("zvc_plus", "zvc_bitpack_tile"),
    "zvc+cast": Format("zvc_plus", "zvc_cast_tile", (4, 8)),
    "zvc+expk": Format("zvc_plus", "zvc_expk_tile", FLOAT_WORDS),
    "zvc+fp8": Format("zvc_plus", "zvc_fp8_tile", FLOAT_WORDS),
    "zvc+int8": Format("zvc_plus", "zvc_int8_tile", FLOAT_WORDS),
    "zvc+mxfp8": Format("zvc_plus", "zvc_mxfp8_tile", FLOAT_WORDS),
}


def kernel(name: str, word: int, direction: str) -> tuple[Callable[..., None], Any]:
    """(kernel, signature) of a format, or of the profiler.

    Args:
        name: a key of `FORMATS`, or "profile".
        word: bytes per word, one of the format's.
        direction: "encode" or "decode"; "sample" for the profiler.
    """
    if name == "profile":
        return profile_kernel(word), profile_signature(word)
    make = FORMATS[name].make()
    if FORMATS[name].standalone:
        made: tuple[Callable[..., None], Any] = make(word, direction)
        return made
    if direction == "encode":
        return encode_kernel(make, word), encode_signature(word)
    return decode_kernel(make, word), decode_signature(word)
