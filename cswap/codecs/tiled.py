"""Codecs whose format is a row of independent tiles (docs/format.md, "Tile container")."""

from __future__ import annotations

import abc
import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cswap.codecs.base import Codec, EncodeKey, LateSize, Stream, word_dtype
from cswap.codecs.layout import bytes_of, words_of
from cswap.codecs.parallel import MAX_RANGES, run_ranges, split
from cswap.errors import CorruptEncodingError, UnsupportedError
from cswap_kernels.tiles import (
    ALIGN,
    ENTRY,
    SLACK,
    TILE_WORDS,
    container_bound,
    count_tiles,
    decode_range,
    directory_bytes,
    encode_range,
    segment_capacity,
    shift_entries,
)

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cswap.schema.tensor import DType
    from cswap_kernels.tiles import TileFunction

MAX_RATIO: Final = 2 * max(TILE_WORDS[w] * w for w in TILE_WORDS) // 8
"""A tile of up to 16 KiB costs at least its directory entry of 8 bytes."""

MAX_BYTES: Final = ALIGN << 32
"""Directory entries count in units of ALIGN, with 32 bits."""


@dataclass(frozen=True, slots=True)
class TileFunctions:
    """The two halves of a format for one word size (contract: cswap_kernels/tiles.py)."""

    encode: TileFunction
    decode: TileFunction


@lru_cache(maxsize=1)
def all_threads() -> int:
    """Threads for a codec that is called without a stream."""
    import torch

    return torch.get_num_threads()


def tile_numel(dtype: torch.dtype) -> int:
    """Elements of a full tile."""
    d = word_dtype(dtype)
    return TILE_WORDS[d.word] * d.word // d.itemsize


class TiledCodec(Codec):
    """Base of the tiled codecs: a family gives its tile functions and their arguments."""

    max_ratio = MAX_RATIO

    @abc.abstractmethod
    def tile_functions(self, dtype: DType) -> TileFunctions:
        """The compiled halves for words of this dtype."""

    @abc.abstractmethod
    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[k] u64: what the tile functions get as ``args``.

        Decode is called with the default key: nothing that it needs may depend on the key.
        """

    def bound(self, dtype: torch.dtype, numel: int) -> int:
        """See `Codec.bound`: every tile raw, and room for MAX_RANGES threads to overshoot."""
        d = word_dtype(dtype)
        n_words = numel * (d.itemsize // d.word)
        ranges = len(split(count_tiles(n_words, d.word), MAX_RANGES))
        return container_bound(n_words, d.word) + ranges * SLACK

    def encode_flat(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        key: EncodeKey,
        stream: Stream | None,
    ) -> int | LateSize:
        """See `Codec.encode_flat`."""
        d = word_dtype(x.dtype)
        words, target = words_of(x), bytes_of(out)
        if container_bound(words.size, d.word) > MAX_BYTES:
            raise UnsupportedError(
                f"tensor of {words.nbytes} bytes: the tile directory reaches {MAX_BYTES}. "
                "Encode it in parts."
            )
        encode = self.tile_functions(d).encode
        args = self.tile_args(d, key)
        capacity = segment_capacity(d.word)
        n_tiles = count_tiles(words.size, d.word)
        start = directory_bytes(n_tiles)
        target[n_tiles * ENTRY : start] = 0  # the padding too is the same every time
        ranges = split(n_tiles, _threads(stream))

        def job(index: int, first: int, last: int) -> int:
            base = start + first * capacity + index * SLACK
            return int(
                encode_range(encode, words, target, args, first, last, TILE_WORDS[d.word], base)
            )

        ends = run_ranges(job, ranges)
        cursor = ends[0]
        for index in range(1, len(ranges)):  # close the holes between the ranges
            base = start + ranges[index][0] * capacity + index * SLACK
            moved = ends[index] - base
            ctypes.memmove(out.data_ptr() + cursor, out.data_ptr() + base, moved)
            shift_entries(target, *ranges[index], base - cursor)
            cursor += moved
        return cursor

    def decode_flat(
        self, payload: torch.Tensor, out: torch.Tensor, *, stream: Stream | None
    ) -> None:
        """See `Codec.decode_flat`."""
        d = word_dtype(out.dtype)
        words, source = words_of(out), bytes_of(payload)
        n_tiles = count_tiles(words.size, d.word)
        if source.size < directory_bytes(n_tiles):
            raise CorruptEncodingError(
                f"encoding of {source.size} bytes is shorter than its directory of {n_tiles} tiles."
            )
        if payload.data_ptr() % ALIGN:
            source = source.copy()
        decode = self.tile_functions(d).decode
        args = self.tile_args(d, EncodeKey())

        def job(_index: int, first: int, last: int) -> int:
            return int(decode_range(decode, source, words, args, first, last, TILE_WORDS[d.word]))

        bad = [t for t in run_ranges(job, split(n_tiles, _threads(stream))) if t >= 0]
        if bad:
            raise CorruptEncodingError(f"codec {self.name!r}: tile {bad[0]} is damaged.")


NO_ARGS: Final[NDArray[Any]] = np.zeros(1, np.uint64)
"""For formats without parameters."""


def _threads(stream: Stream | None) -> int:
    return all_threads() if stream is None else stream.threads
