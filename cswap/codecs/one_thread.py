"""`OneThread`: tiled codecs, called by the addresses of a CPU's memory.

For tensors that are too small for several threads. All that depends only on the codec, the dtype
and the size is found once: with cold caches, finding it again takes as long as a kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.errors import CorruptEncodingError
from cswap_kernels.tile_calls import WORD_LIKE
from cswap_kernels.tiles import SLACK, TILE_WORDS, container_bound, decode_at, encode_at

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cswap.schema.tensor import DType


class OneThread:
    """Encodes and decodes tensors of one dtype and size by one codec, in the calling thread.

    Addresses are multiples of the word's size, those of payloads of 16 bytes. Nobody checks that.

    Attributes:
        bound: bytes that `encode` may write.
    """

    __slots__ = (
        "_args",
        "_codec",
        "_decoder",
        "_directory",
        "_encoder",
        "_like",
        "_n_tiles",
        "_n_words",
        "_tile",
        "bound",
    )

    def __init__(
        self,
        codec: str,
        dtype: DType,
        tiles: tuple[int, int, int],
        functions: tuple[int, int],
        args: NDArray[np.uint64],
    ) -> None:
        """Prepare it.

        Args:
            codec: its name.
            dtype: of the tensors.
            tiles: words of a tensor, its tiles, and bytes of the directory.
            functions: addresses of the two tile functions: encode, decode.
            args: of the tile functions, with the default key.
        """
        self._codec = codec
        self._like, self._tile = WORD_LIKE[dtype.word], TILE_WORDS[dtype.word]
        self._n_words, self._n_tiles, self._directory = tiles
        self._encoder, self._decoder = functions
        self._args = args
        self.bound = container_bound(self._n_words, dtype.word) + SLACK

    def encode(self, source: int, target: int, args: NDArray[np.uint64] | None = None) -> int:
        """Encode the tensor at an address; returns the payload's bytes.

        Args:
            source: address of the tensor.
            target: address of `bound` bytes.
            args: of the tile functions; None: those with the default key.
        """
        args = self._args if args is None else args
        return int(
            encode_at(
                self._encoder,
                self._like,
                source,
                self._n_words,
                target,
                self.bound,
                args,
                self._tile,
            )
        )

    def decode(self, payload: int, nbytes: int, target: int) -> None:
        """Decode a payload to an address.

        Args:
            payload: its address.
            nbytes: its bytes.
            target: address of the tensor.

        Raises:
            CorruptEncodingError: it is no encoding of such a tensor.
        """
        if nbytes < self._directory:
            raise too_short(nbytes, self._n_tiles)
        bad = decode_at(
            self._decoder,
            self._like,
            payload,
            nbytes,
            target,
            self._n_words,
            self._args,
            self._tile,
        )
        if bad >= 0:
            raise damaged(self._codec, bad)


def too_short(nbytes: int, n_tiles: int) -> CorruptEncodingError:
    """The error for a payload of so many bytes that should hold so many tiles."""
    return CorruptEncodingError(
        f"encoding of {nbytes} bytes is shorter than its directory of {n_tiles} tiles."
    )


def damaged(codec: str, tile: int) -> CorruptEncodingError:
    """The error for a tile that is no encoding of the codec. Args: tile: its number."""
    return CorruptEncodingError(f"codec {codec!r}: tile {tile} is damaged.")
