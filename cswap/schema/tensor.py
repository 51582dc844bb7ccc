"""Records of a tensor: dtype, layout, and a profile of its values.

The module needs only the standard library, so planning and reporting work without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

Kind = Literal["float", "int", "uint", "bool", "other"]


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype in the view of codecs: a row of equal words.

    Attributes:
        name: torch's own name without the prefix, such as ``bfloat16``.
        itemsize: bytes of one element.
        word: bytes of one word; a complex element is two words of its real dtype.
        kind: interpretation of a word.
        exponent_bits: exponent bits of one word; 0 unless ``kind`` is ``float``.
        mantissa_bits: stored mantissa bits of one word; 0 unless ``kind`` is ``float``.
    """

    name: str
    itemsize: int
    word: int
    kind: Kind
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @property
    def is_complex(self) -> bool:
        """Whether an element is two words, real and imaginary."""
        return self.itemsize == 2 * self.word


def _float(name: str, nbytes: int, exponent: int, mantissa: int) -> DType:
    return DType(name, nbytes, nbytes, "float", exponent, mantissa)


def _complex(name: str, nbytes: int, exponent: int, mantissa: int) -> DType:
    return DType(name, nbytes, nbytes // 2, "float", exponent, mantissa)


DTYPES: Final[dict[str, DType]] = {
    d.name: d
    for d in (
        _float("float64", 8, 11, 52),
        _float("float32", 4, 8, 23),
        _float("float16", 2, 5, 10),
        _float("bfloat16", 2, 8, 7),
        _float("float8_e4m3fn", 1, 4, 3),
        _float("float8_e4m3fnuz", 1, 4, 3),
        _float("float8_e5m2", 1, 5, 2),
        _float("float8_e5m2fnuz", 1, 5, 2),
        DType("float8_e8m0fnu", 1, 1, "other"),
        DType("float4_e2m1fn_x2", 1, 1, "other"),
        _complex("complex128", 16, 11, 52),
        _complex("complex64", 8, 8, 23),
        _complex("complex32", 4, 5, 10),
        *(DType(f"int{b}", b // 8, b // 8, "int") for b in (8, 16, 32, 64)),
        *(DType(f"uint{b}", b // 8, b // 8, "uint") for b in (8, 16, 32, 64)),
        DType("bool", 1, 1, "bool"),
    )
}
"""Every dtype that autograd can save and cswap can encode, by torch's name."""


@cache
def dtype_name(dtype: object) -> str:
    """Torch's name of a dtype, the key of `DTYPES`: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Layout of one tensor: enough to build an equal tensor.

    Attributes:
        dtype: a key of `DTYPES`.
        sizes: shape, in elements.
        strides: in elements, one per size; 0 for an expanded dimension.
        storage_offset: elements before the first, in the original storage.
        device: torch's name of the device, such as ``cuda:1``.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int = 0
    device: str = "cpu"

    @property
    def numel(self) -> int:
        """Number of elements that indexing can reach; an expanded element counts every time."""
        return math.prod(self.sizes)

    @property
    def span(self) -> int:
        """Elements from the first to the last in memory, gaps included; 0 if empty.

        >>> TensorMeta("float32", (3, 4), (8, 2)).span
        23
        >>> TensorMeta("float32", (1000, 4), (0, 1)).span
        4
        """
        if 0 in self.sizes:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the span."""
        return self.span * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class TensorProfile:
    """Statistics of a tensor's values, from a sample.

    Fractions refer to the sampled words and lie in [0, 1].

    Attributes:
        dtype: a key of `DTYPES`.
        nbytes: raw bytes of the whole tensor.
        sampled: number of sampled words; 0 means that nothing is known.
        zero_fraction: fraction of words whose bits are all zero (-0.0 does not count).
        repeat_fraction: fraction of words that equal the preceding word of their sampled piece.
        spread: fractions of words (zeros included) whose exponent lies less than 1, 3, 7 and 15
            below the largest of their piece. The pieces of a sample are shorter than a tile, so
            the fractions are slightly too high, and more so with long tails. Empty unless floating.
        spread_nonzero: the same fractions among nonzero words, which are the words that zvc keeps.
        int_bits: bits that (largest - smallest) of a piece needs, mean over sampled pieces;
            None unless integer or bool.
        non_finite: fraction of words that are NaN or infinite.
        amax: largest finite magnitude in the sample; 0.0 unless floating.
        zero_exponent: fraction of words whose exponent bits are all zero: 0.0, denormals, and
            -0.0, which dropout makes from negative values. 0.0 unless floating.
    """

    dtype: str
    nbytes: int
    sampled: int = 0
    zero_fraction: float = 0.0
    repeat_fraction: float = 0.0
    spread: tuple[float, ...] = ()
    spread_nonzero: tuple[float, ...] = ()
    int_bits: float | None = None
    non_finite: float = 0.0
    amax: float = 0.0
    zero_exponent: float = 0.0
