"""The tensor profiler: statistics of a tensor's values, from a sample."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from cswap.codecs.layout import words_of
from cswap.schema.tensor import DTYPES, DType, TensorProfile, dtype_name
from cswap_kernels import profile as kernel
from cswap_kernels.tiles import TILE_WORDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLES: Final = {"float": (64, 64), "other": (64, 64)}
"""Number of pieces, and words per piece, by kind of dtype. Many small pieces, since zeros occur in
patches."""

INTEGER_SAMPLES: Final = (16, 256)
"""The same for integers: pieces long enough to show the range of a tile of indices."""


def profile(
    x: torch.Tensor, *, samples: int | None = None, piece_words: int | None = None
) -> TensorProfile:
    """Profile x from ``samples`` pieces of ``piece_words`` words each, spread evenly.

    Args:
        x: [n] flat and contiguous, on a CPU.
        samples: number of pieces; more pieces are more exact and slower. Default: 4096 words in
            all.
        piece_words: words per piece.
    """
    d = DTYPES[dtype_name(x.dtype)]
    nbytes = x.numel() * d.itemsize
    if nbytes == 0:
        return TensorProfile(d.name, 0)
    usual = SAMPLES.get(d.kind, INTEGER_SAMPLES)
    samples, piece_words = samples or usual[0], piece_words or usual[1]
    words = words_of(x)
    if words.size <= samples * piece_words:
        samples = -(-words.size // piece_words)
    counts = np.empty(kernel.N_COUNTS, np.int64)
    kernel.profile_pieces(words, samples, piece_words, _layout(d), counts)
    return _from_counts(d, nbytes, counts.tolist())


class LateProfile:
    """A profile that arrives later, so that the host does not wait for the GPU.

    The GPU copies a sample to pinned memory, behind the computation that made the tensor.
    """

    def __init__(self, x: torch.Tensor) -> None:
        """Args: x: [n] flat and contiguous, on any device; n at least 1."""
        self._dtype = DTYPES[dtype_name(x.dtype)]
        self._nbytes = x.nbytes
        self._arriving = self._sample(x)
        self._copied = torch.cuda.Event() if x.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(x.device))

    def get(self) -> TensorProfile | None:
        """The profile, or None if the sample has not arrived yet."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        return replace(profile(self._arriving.view(-1)), nbytes=self._nbytes)

    def wait(self) -> TensorProfile:
        """The profile; waits until the sample has arrived."""
        if self._copied is not None:
            self._copied.synchronize()
        found = self.get()
        assert found is not None  # waited for above
        return found

    def _sample(self, x: torch.Tensor) -> torch.Tensor:
        d = self._dtype
        samples, piece_words = SAMPLES.get(d.kind, INTEGER_SAMPLES)
        piece = max(1, piece_words * d.word // d.itemsize)
        pieces = x
        if x.numel() > samples * piece:
            step = (x.numel() - piece) // (samples - 1)
            pieces = x.as_strided((samples, piece), (step, 1))
        sample = torch.empty(pieces.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        return sample.copy_(pieces, non_blocking=True)


def profile_all(x: torch.Tensor) -> TensorProfile:
    """Profile x from all of its words, in pieces of one tile: exact and slow."""
    d = DTYPES[dtype_name(x.dtype)]
    n_words, tile = x.numel() * (d.itemsize // d.word), TILE_WORDS[d.word]
    return profile(x, samples=max(1, -(-n_words // tile)), piece_words=tile)


@cache
def _layout(d: DType) -> NDArray[np.int64]:
    """Bit layout of a word for the kernel: see `cswap_kernels.profile`."""
    layout = np.zeros(kernel.N_LAYOUT, np.int64)
    layout[kernel.EXPONENT_BITS] = -1 if d.kind == "other" else d.exponent_bits
    layout[kernel.MANTISSA_BITS] = d.mantissa_bits
    sign = np.uint64(1 << (8 * d.word - 1))
    layout.view(np.uint64)[kernel.FLIP] = sign if d.kind == "int" else 0
    below_sign = 1 << (d.exponent_bits + d.mantissa_bits)
    layout[kernel.NAN] = -1
    if d.name.endswith("fnuz"):  # no infinity; NaN is where -0.0 would be
        layout[kernel.LARGEST], layout[kernel.NAN] = below_sign - 1, below_sign
    elif d.name.endswith("fn"):  # no infinity; NaN is all ones
        layout[kernel.LARGEST] = below_sign - 2
    else:
        layout[kernel.LARGEST] = below_sign - (1 << d.mantissa_bits) - 1
    return layout


def _from_counts(d: DType, nbytes: int, counts: list[int]) -> TensorProfile:
    n = counts[kernel.WORDS]
    nonzero = max(n - counts[kernel.ZEROS], 1)
    is_float, is_int = d.kind == "float", d.kind in ("int", "uint", "bool")
    within = counts[kernel.SPREAD : kernel.SPREAD + 4]
    within_nonzero = counts[kernel.SPREAD_NONZERO : kernel.SPREAD_NONZERO + 4]
    return TensorProfile(
        dtype=d.name,
        nbytes=nbytes,
        sampled=n,
        zero_fraction=counts[kernel.ZEROS] / n,
        repeat_fraction=counts[kernel.REPEATS] / max(counts[kernel.FOLLOWERS], 1),
        spread=tuple(c / n for c in within) if is_float else (),
        spread_nonzero=tuple(c / nonzero for c in within_nonzero) if is_float else (),
        int_bits=counts[kernel.INT_BITS] / counts[kernel.PIECES] if is_int else None,
        non_finite=counts[kernel.NON_FINITE] / n,
        amax=_value_of(counts[kernel.AMAX], d) if is_float else 0.0,
        zero_exponent=counts[kernel.ZERO_EXPONENT] / n,
    )


def _value_of(bits: int, d: DType) -> float:
    """The non-negative float with these bits."""
    exponent, mantissa = bits >> d.mantissa_bits, bits & ((1 << d.mantissa_bits) - 1)
    if d.word == 8:
        return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
    bias = (1 << (d.exponent_bits - 1)) - (not d.name.endswith("fnuz"))
    if exponent == 0:
        return float(mantissa * 2.0 ** (1 - bias - d.mantissa_bits))
    return float((1 + mantissa / (1 << d.mantissa_bits)) * 2.0 ** (exponent - bias))
