"""Codecs whose format is a row of independent tiles (docs/format.md, "Tile container")."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import numpy as np

from cswap.codecs import gpu
from cswap.codecs.base import (
    DEFAULT_KEY,
    Codec,
    EncodeKey,
    LateSize,
    Stream,
    word_dtype,
)
from cswap.codecs.layout import address_of, bytes_of, words_of
from cswap.codecs.parallel import DEFAULT_SHAPE, SHAPES, run_ranges, split
from cswap.errors import CorruptEncodingError, UnsupportedError
from cswap.schema.tensor import DTYPES
from cswap_kernels.tile_calls import WORD_LIKE, tile_decoder, tile_encoder
from cswap_kernels.tiles import (
    ALIGN,
    CHUNK,
    ENTRY,
    SLACK,
    TILE_WORDS,
    container_bound,
    count_tiles,
    decode_at,
    decode_range,
    directory_bytes,
    encode_at,
    encode_chunks,
    segment_capacity,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from cswap.schema.tensor import DType
    from cswap_kernels.tile_calls import TileFunction

MAX_RATIO: Final = 2 * max(TILE_WORDS[w] * w for w in TILE_WORDS) // 8
"""A tile of up to 16 KiB takes at least its directory entry of 8 bytes."""

MAX_BYTES: Final = ALIGN << 32
"""Largest payload: directory entries are 32-bit counts of ALIGN bytes."""


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
    """Base of the tiled codecs: a subclass provides tile functions and their arguments.

    Attributes:
        kernels: encode_tile and decode_tile (contract: cswap_kernels/tiles.py).
    """

    max_ratio = MAX_RATIO
    kernels: ClassVar[tuple[Callable[..., int], Callable[..., int]]]

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """The compiled halves for words of this dtype."""
        encode, decode = self.kernels
        return TileFunctions(tile_encoder(encode, dtype.word), tile_decoder(decode, dtype.word))

    @abc.abstractmethod
    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[k] u64: the parameter ``args`` of the tile functions.

        Decode is called with the default key, so its arguments must not depend on the key.
        """

    @property
    def cuda_format(self) -> str:
        """Name of the CUDA twin, as `cswap_kernels.cuda.formats` has it."""
        return self.name

    def cuda_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[<= 4] u64: arguments of the CUDA twin. Default: those of the CPU's tile functions."""
        return self.tile_args(dtype, key)

    def runs_on(self, device: str, dtype: torch.dtype) -> bool:
        """Whether a twin for that kind of device exists and can run here."""
        return device == "cpu" or (
            device == "cuda" and gpu.has_kernels(self.cuda_format, word_dtype(dtype).word)
        )

    def bound(self, dtype: torch.dtype, numel: int) -> int:
        """See `Codec.bound`: every tile raw, and slack behind the last."""
        d = word_dtype(dtype)
        return container_bound(numel * (d.itemsize // d.word), d.word) + SLACK

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
        n_words, n_tiles, directory_nbytes = _tiles_of(x.nbytes, d.word)
        if x.is_cuda:
            params = self.cuda_args(d, key).tolist()
            return gpu.encode(self.cuda_format, d.word, x, out, params, cuda_stream(stream))
        (encoder, _), args = _functions(self, d.name)
        if not self.lossless:
            args = self.tile_args(d, key)
        tile, threads = TILE_WORDS[d.word], all_threads() if stream is None else stream.threads
        shape = SHAPES.get(f"{self.name}-encode", DEFAULT_SHAPE)
        if threads == 1 or n_tiles < 2 * shape.least:
            source, target = address_of(x, d.word), address_of(out)
            like, bound = WORD_LIKE[d.word], container_bound(n_words, d.word) + SLACK
            return int(encode_at(encoder, like, source, n_words, target, bound, args, tile))
        ranges = split(n_tiles, threads, shape)
        words, memory = words_of(x), bytes_of(out)
        directory = memory[: n_tiles * ENTRY].view(np.uint32)  # [n_tiles, 2]
        memory[n_tiles * ENTRY : directory_nbytes] = 0  # equal inputs give equal bytes
        queue = np.array([0, 0, directory_nbytes])

        def job(_index: int, _first: int, _last: int) -> None:
            scratch = np.empty(CHUNK * segment_capacity(d.word) + SLACK, np.uint8)
            encode_chunks(encoder, words, memory, directory, args, tile, queue, scratch)

        run_ranges(job, ranges)
        return int(queue[-1])

    def decode_flat(
        self, payload: torch.Tensor, out: torch.Tensor, *, stream: Stream | None
    ) -> None:
        """See `Codec.decode_flat`."""
        d = word_dtype(out.dtype)
        n_words, n_tiles, directory_nbytes = _tiles_of(out.nbytes, d.word)
        nbytes = payload.numel()
        if nbytes < directory_nbytes:
            raise CorruptEncodingError(
                f"encoding of {nbytes} bytes is shorter than its directory of {n_tiles} tiles."
            )
        if out.is_cuda:
            args = self.cuda_args(d, DEFAULT_KEY).tolist()
            gpu.decode(self.cuda_format, d.word, payload, out, args, cuda_stream(stream))
            return
        if payload.data_ptr() % ALIGN:
            payload = payload.clone()
        (_, decoder), args = _functions(self, d.name)
        tile, threads = TILE_WORDS[d.word], all_threads() if stream is None else stream.threads
        shape = SHAPES.get(f"{self.name}-decode", DEFAULT_SHAPE)
        if threads == 1 or n_tiles < 2 * shape.least:
            source, target, like = address_of(payload), address_of(out, d.word), WORD_LIKE[d.word]
            self._refuse(decode_at(decoder, like, source, nbytes, target, n_words, args, tile))
            return
        words, memory = words_of(out), bytes_of(payload)

        def job(_index: int, first: int, last: int) -> int:
            return int(decode_range(decoder, memory, words, args, first, last, tile))

        for bad in run_ranges(job, split(n_tiles, threads, shape)):
            self._refuse(bad)

    def _refuse(self, tile: int) -> None:
        # The number of a tile that is no encoding; below 0: there is none.
        if tile >= 0:
            raise CorruptEncodingError(f"codec {self.name!r}: tile {tile} is damaged.")


NO_ARGS: Final[NDArray[Any]] = np.zeros(1, np.uint64)
"""Arguments of formats without parameters."""


def cuda_stream(stream: Stream | None) -> torch.cuda.Stream | None:
    """The stream of a call whose tensors are on a GPU."""
    return cast("torch.cuda.Stream | None", stream)


@lru_cache(maxsize=4096)
def _tiles_of(nbytes: int, word: int) -> tuple[int, int, int]:
    """Words, tiles and bytes of the directory of a tensor of so many bytes.

    Raises:
        UnsupportedError: the directory cannot count so many bytes.
    """
    n_words = nbytes // word
    if container_bound(n_words, word) > MAX_BYTES:
        raise UnsupportedError(
            f"tensor of {nbytes} bytes: the tile directory reaches {MAX_BYTES}. Encode it in parts."
        )
    n_tiles = count_tiles(n_words, word)
    return n_words, n_tiles, directory_bytes(n_tiles)


@lru_cache(maxsize=256)
def _functions(codec: TiledCodec, dtype: str) -> tuple[tuple[int, int], NDArray[np.uint64]]:
    # Addresses of the two tile functions, and their arguments with the default key.
    d = DTYPES[dtype]
    both = codec.tile_functions(d)
    return (both.encode.address, both.decode.address), codec.tile_args(d, DEFAULT_KEY)
