"""Tensors for tests of codecs: dtype x sizes x layout x values, drawn by Hypothesis.

A `TensorSpec` describes a drawn tensor. A failing test prints it, and it builds the tensor again:
``TensorSpec("bfloat16", (3, 5), "gaps", "bits", 7).build()``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from cswap.codecs.layout import torch_dtype
from cswap.schema.tensor import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import SearchStrategy
    from numpy.typing import NDArray

    from cswap.schema.tensor import DType

LAYOUTS: Final = (
    "contiguous",
    "permuted",
    "expanded",
    "gaps",
    "columns",
    "channels_last",
    "offset",
    "windows",
)
"""gaps: every other row, and a part of each. columns: every fifth element. windows: overlap."""

FLOAT_VALUES: Final = ("normal", "sparse", "spread", "signed_zeros", "denormal", "non_finite")
WORD_VALUES: Final = ("zeros", "constant", "bits", "extremes", "ramp", "runs", "sparse")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One test tensor.

    Attributes:
        dtype: a key of `DTYPES`.
        sizes: wanted sizes; some layouts change them.
        layout: one of `LAYOUTS`.
        values: one of `values_for`.
        seed: seed of the values and of the layout's random choices.
    """

    dtype: str
    sizes: tuple[int, ...]
    layout: str = "contiguous"
    values: str = "normal"
    seed: int = 0

    def build(self) -> torch.Tensor:
        """Build the tensor, a view into a storage in which the gaps are filled, too."""
        rng = np.random.default_rng(self.seed)
        sizes, strides, offset = _layout(self.layout, self.sizes, rng)
        span = (
            0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        )
        d = DTYPES[self.dtype]
        words = make_words(d, self.values, (offset + span) * d.itemsize // d.word, rng)
        base = torch.from_numpy(words.view(np.uint8)).view(torch_dtype(self.dtype))
        return base.as_strided(sizes, strides, offset)


def values_for(dtype: str) -> tuple[str, ...]:
    """Kinds of values that a dtype can have.

    >>> values_for("bool")
    ('zeros', 'constant', 'runs', 'sparse')
    """
    kind = DTYPES[dtype].kind
    if kind == "bool":
        return ("zeros", "constant", "runs", "sparse")
    return tuple(dict.fromkeys((*FLOAT_VALUES, *WORD_VALUES))) if kind == "float" else WORD_VALUES


def specs(
    dtypes: Sequence[str] | None = None, *, max_numel: int = 10_000
) -> SearchStrategy[TensorSpec]:
    """Hypothesis strategy of specs.

    Args:
        dtypes: keys of `DTYPES` to choose from. Default: all.
        max_numel: largest number of elements; the default reaches into a second tile.
    """
    import hypothesis.strategies as st

    # Many dimensions, or few large ones: sizes that do not multiply beyond max_numel.
    small = st.lists(st.integers(0, 5), min_size=0, max_size=5)
    large = st.lists(st.integers(1, max_numel), min_size=1, max_size=2)
    sizes = st.one_of(small, large).filter(lambda s: math.prod(s) <= max_numel).map(tuple)

    def of_dtype(dtype: str) -> SearchStrategy[TensorSpec]:
        return st.builds(
            TensorSpec,
            dtype=st.just(dtype),
            sizes=sizes,
            layout=st.sampled_from(LAYOUTS),
            values=st.sampled_from(values_for(dtype)),
            seed=st.integers(0, 2**16),
        )

    return st.sampled_from(list(dtypes or DTYPES)).flatmap(of_dtype)


def tensors(
    dtypes: Sequence[str] | None = None, *, max_numel: int = 10_000
) -> SearchStrategy[torch.Tensor]:
    """Hypothesis strategy of tensors of any layout and values; see `specs`."""
    return specs(dtypes, max_numel=max_numel).map(TensorSpec.build)


def make_words(dtype: DType, values: str, n_words: int, rng: np.random.Generator) -> NDArray[Any]:
    """[n_words] unsigned words of a dtype with values of that kind."""
    unsigned = np.dtype(f"u{dtype.word}")
    if dtype.kind == "bool":
        return _make_bools(values, n_words, rng)
    words = np.zeros(n_words, unsigned)
    if n_words:
        words[:] = _plain_words(dtype, values, n_words, rng)
    if values == "sparse":
        words[rng.random(n_words) < 0.6] = 0
    return words


def _make_bools(values: str, n_words: int, rng: np.random.Generator) -> NDArray[Any]:
    # Only 0 and 1: PyTorch does not define the meaning of other bytes.
    if values == "runs":
        return np.repeat(rng.integers(0, 2, n_words, np.uint8), 37)[:n_words].copy()
    share = {"zeros": 0.0, "constant": 1.0, "sparse": 0.3}[values]
    return (rng.random(n_words) < share).astype(np.uint8)


def _plain_words(dtype: DType, values: str, n: int, rng: np.random.Generator) -> NDArray[Any]:
    # n > 0
    unsigned = np.dtype(f"u{dtype.word}")
    top = 1 << (8 * dtype.word - 1)
    if values == "zeros":
        return np.zeros(n, unsigned)
    if values == "constant":
        return np.full(n, _bits(dtype, 1, rng)[0])
    if values == "bits":
        return _bits(dtype, n, rng)
    if values == "extremes":
        return rng.choice(np.array([0, 1, top - 1, top, 2 * top - 1], unsigned), n)
    if values == "ramp":
        return (np.arange(n, dtype=np.uint64) + np.uint64(top - 20)).astype(unsigned)
    if values == "runs":
        return np.repeat(_bits(dtype, n, rng), 37)[:n].copy()
    return _float_words(dtype, values, n, rng) if dtype.kind == "float" else _counts(dtype, n, rng)


def _float_words(dtype: DType, values: str, n: int, rng: np.random.Generator) -> NDArray[Any]:
    unsigned = np.dtype(f"u{dtype.word}")
    top = unsigned.type(1 << (8 * dtype.word - 1))
    normal = _normal(dtype, n, rng)
    if values == "spread":  # magnitudes over the dtype's range, except those whose squares overflow
        keep = unsigned.type((1 << dtype.mantissa_bits) - 1) | top
        exponents = rng.integers(1, 3 << (dtype.exponent_bits - 2), n).astype(unsigned)
        normal = (normal & keep) | exponents << unsigned.type(dtype.mantissa_bits)
    picked = rng.random(n)
    if values == "signed_zeros":
        normal[picked < 0.4] = 0
        normal[picked > 0.7] = top
    elif values == "denormal":
        normal[picked < 0.7] &= unsigned.type((1 << dtype.mantissa_bits) - 1) | top
    elif values == "non_finite":
        infinite = unsigned.type(((1 << dtype.exponent_bits) - 1) << dtype.mantissa_bits)
        normal[picked < 0.05] |= infinite  # NaNs of many payloads
        normal[picked > 0.97] = infinite
    return normal


def _normal(dtype: DType, n: int, rng: np.random.Generator) -> NDArray[Any]:
    # A complex element is two words of the real dtype of half its size.
    name = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
    real = torch_dtype(name.get(dtype.name, dtype.name))
    values = torch.from_numpy(rng.standard_normal(n)).to(torch.float32).to(real)
    return values.view(torch.uint8).numpy().view(f"u{dtype.word}").copy()


def _bits(dtype: DType, n: int, rng: np.random.Generator) -> NDArray[Any]:
    return rng.integers(0, 256, n * dtype.word, np.uint8).view(f"u{dtype.word}")


def _counts(dtype: DType, n: int, rng: np.random.Generator) -> NDArray[Any]:
    return rng.integers(0, 100, n).astype(f"u{dtype.word}")


def _layout(
    kind: str, sizes: tuple[int, ...], rng: np.random.Generator
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    # Sizes, strides and offset of a tensor of that layout.
    if kind == "windows":
        n = math.prod(sizes)
        return (n, 3), (1, 1), 0
    if kind == "channels_last":
        n, c, h, w = (*sizes, 2, 3, 1, 2)[:4]
        return (n, c, h, w), (h * w * c, 1, w * c, c), 0
    if not sizes:
        return (), (), 1 if kind == "offset" else 0
    if kind == "expanded":
        axis = int(rng.integers(len(sizes)))
        inner = _dense(tuple(1 if i == axis else n for i, n in enumerate(sizes)))
        return sizes, tuple(0 if i == axis else s for i, s in enumerate(inner)), 0
    if kind == "columns":
        return sizes, tuple(s * 5 for s in _dense(sizes)), 2
    if kind == "gaps":
        strides = list(_dense((*sizes[:-1], sizes[-1] + 3)))
        strides[0] *= 2
        return sizes, tuple(strides), 1
    if kind == "permuted":
        order = rng.permutation(len(sizes))
        dense = _dense(tuple(sizes[i] for i in order))
        return sizes, tuple(dense[list(order).index(i)] for i in range(len(sizes))), 0
    return sizes, _dense(sizes), 3 if kind == "offset" else 0


def _dense(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides = [math.prod(max(n, 1) for n in sizes[i + 1 :]) for i in range(len(sizes))]
    return tuple(strides)
