"""``lz4`` and ``zstd``: general-purpose codecs of the CPU. See docs/format.md, "Host codecs".

The raw bytes are cut into blocks of 1 MiB. Each block is encoded on its own, so several threads can
work on one tensor. A directory holds the length of each block. Both packages are optional.
"""

from __future__ import annotations

import abc
import importlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cswap.codecs.base import Codec, EncodeKey, LateSize, Stream
from cswap.codecs.layout import bytes_of
from cswap.codecs.parallel import RangeShape, run_ranges, split
from cswap.codecs.tiled import all_threads
from cswap.errors import ConfigError, CorruptEncodingError
from cswap.install_hint import to_install
from cswap.schema.tensor import DTYPES, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

BLOCK_BYTES: Final = 1 << 20
"""Raw bytes of a block: longer than both codecs' windows, and enough blocks for many threads."""

ENTRY: Final = 4
"""Bytes of a directory entry: u32 bytes of the block, bit 31 set where it is stored raw."""

RAW: Final = 0x80000000

ONE_BLOCK: Final = RangeShape(least=1)
"""Blocks are large: each is worth a thread."""


class HostCodec(Codec):
    """Base of the host codecs: a subclass provides the functions for one block."""

    lossless = True

    @abc.abstractmethod
    def block_encoder(self) -> Callable[[Bytes], bytes]:
        """A function that encodes a block. It may keep state: one thread alone calls it."""

    @abc.abstractmethod
    def block_decoder(self) -> Callable[[Bytes, int], bytes]:
        """A function that decodes a block of at most the given raw bytes, for one thread alone.

        It allocates no more than that, also if the block claims more. It raises
        CorruptEncodingError if the block cannot be decoded.
        """

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Every dtype, in host memory."""
        return device == "cpu" and dtype_name(dtype) in DTYPES

    def bound(self, dtype: torch.dtype, numel: int) -> int:
        """Bytes of the directory and of all blocks, raw."""
        raw_bytes = numel * dtype.itemsize
        return ENTRY * _count_blocks(raw_bytes) + raw_bytes

    def encode_flat(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        key: EncodeKey,
        stream: Stream | None,
    ) -> int | LateSize:
        """See `Codec.encode_flat`."""
        raw, target = bytes_of(x), bytes_of(out)
        n_blocks = _count_blocks(raw.size)

        def job(_index: int, first: int, last: int) -> list[tuple[int, Bytes | bytes]]:
            encode = self.block_encoder()
            blocks = (raw[b * BLOCK_BYTES : (b + 1) * BLOCK_BYTES] for b in range(first, last))
            return [_shorter(block, encode(block)) for block in blocks]

        cursor = ENTRY * n_blocks
        directory = np.empty(n_blocks, "<u4")
        parts = run_ranges(job, split(n_blocks, _threads(stream), ONE_BLOCK))
        for block, (entry, segment) in enumerate(part for found in parts for part in found):
            directory[block] = entry
            target[cursor : cursor + len(segment)] = np.frombuffer(segment, np.uint8)
            cursor += len(segment)
        target[: ENTRY * n_blocks] = directory.view(np.uint8)
        return cursor

    def decode_flat(
        self, payload: torch.Tensor, out: torch.Tensor, *, stream: Stream | None
    ) -> None:
        """See `Codec.decode_flat`."""
        source, target = bytes_of(payload), bytes_of(out)
        starts, is_raw = _read_directory(source, _count_blocks(target.size))

        def job(_index: int, first: int, last: int) -> None:
            decode = self.block_decoder()
            for block in range(first, last):
                x = target[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
                segment = source[starts[block] : starts[block + 1]]
                found = segment if is_raw[block] else decode(segment, x.size)
                if len(found) != x.size:
                    raise CorruptEncodingError(
                        f"codec {self.name!r}: block {block} holds {len(found)} bytes, "
                        f"{x.size} expected."
                    )
                x[:] = np.frombuffer(found, np.uint8)

        run_ranges(job, split(len(is_raw), _threads(stream), ONE_BLOCK))


class Lz4(HostCodec):
    """LZ4 blocks, as ``lz4.block`` writes them without a size in front."""

    name = "lz4"
    max_ratio = 256  # a byte of an LZ4 match length stands for at most 255 bytes

    def __init__(self) -> None:
        self._lz4 = _optional("lz4.block", self.name)

    def block_encoder(self) -> Callable[[Bytes], bytes]:
        """See `HostCodec.block_encoder`."""
        compress = self._lz4.compress
        return lambda block: compress(block, store_size=False)

    def block_decoder(self) -> Callable[[Bytes, int], bytes]:
        """See `HostCodec.block_decoder`."""
        lz4 = self._lz4

        def decode(segment: Bytes, raw_bytes: int) -> bytes:
            try:
                return lz4.decompress(segment, uncompressed_size=raw_bytes)  # type: ignore[no-any-return]
            except lz4.LZ4BlockError as error:
                raise CorruptEncodingError(f"codec 'lz4': {error}") from error

        return decode


class Zstd(HostCodec):
    """Zstandard frames of level 1, each with its content size."""

    name = "zstd"
    max_ratio = 1 << 15  # 1 MiB: 8 blocks of 4 bytes or more, and the directory's entry

    def __init__(self) -> None:
        self._zstd = _optional("zstandard", self.name)

    def block_encoder(self) -> Callable[[Bytes], bytes]:
        """See `HostCodec.block_encoder`."""
        return self._zstd.ZstdCompressor(level=1).compress  # type: ignore[no-any-return]

    def block_decoder(self) -> Callable[[Bytes, int], bytes]:
        """See `HostCodec.block_decoder`."""
        zstd = self._zstd
        decompressor = zstd.ZstdDecompressor(max_window_size=BLOCK_BYTES)

        def decode(segment: Bytes, raw_bytes: int) -> bytes:
            try:
                # decompress() allocates the size that the frame claims, so check it first.
                claimed = zstd.frame_content_size(segment)
                if claimed != raw_bytes:
                    raise CorruptEncodingError(
                        f"codec 'zstd': frame claims {claimed} bytes, {raw_bytes} expected."
                    )
                return decompressor.decompress(segment, allow_extra_data=False)  # type: ignore[no-any-return]
            except zstd.ZstdError as error:
                raise CorruptEncodingError(f"codec 'zstd': {error}") from error

        return decode


def _optional(module: str, codec: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"codec={codec!r}: needs the package {module.partition('.')[0]!r} ({error}). "
            f"Install it: {to_install('host')}."
        ) from error


def _count_blocks(raw_bytes: int) -> int:
    return -(-raw_bytes // BLOCK_BYTES)


def _shorter(block: Bytes, encoded: bytes) -> tuple[int, Bytes | bytes]:
    # Directory entry and bytes of a block: encoded, or raw if the encoding is not shorter.
    if len(encoded) < block.size:
        return len(encoded), encoded
    return block.size | RAW, block


def _read_directory(source: Bytes, n_blocks: int) -> tuple[list[int], list[bool]]:
    # [n_blocks + 1] start of each block, and end of the last; [n_blocks] whether it is raw.
    if source.size < ENTRY * n_blocks:
        raise CorruptEncodingError(
            f"encoding of {source.size} bytes is shorter than its directory of {n_blocks} blocks."
        )
    entries = np.frombuffer(source[: ENTRY * n_blocks], "<u4").astype(np.int64)
    lengths = entries & (RAW - 1)
    starts = ENTRY * n_blocks + np.concatenate(([0], np.cumsum(lengths)))
    if starts[-1] != source.size:
        raise CorruptEncodingError(
            f"encoding of {source.size} bytes: its blocks end at byte {starts[-1]}."
        )
    return starts.tolist(), (entries >= RAW).tolist()


def _threads(stream: Stream | None) -> int:
    return all_threads() if stream is None else stream.threads
