"""``zfp``, ``zfp:RATE``: zfp at a fixed rate (docs/format/zfp.md).

A CPU uses the package ``zfpy``, a GPU our own kernel.
"""

from __future__ import annotations

import importlib
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cswap.codecs import gpu
from cswap.codecs.base import Codec, EncodeKey, LateSize, Stream, word_dtype
from cswap.codecs.layout import bytes_of, words_of
from cswap.codecs.lossy import FLOATS, float_kind
from cswap.codecs.tiled import cuda_stream
from cswap.errors import ConfigError, CorruptEncodingError
from cswap.install_hint import to_install
from cswap.schema.tensor import dtype_name
from cswap_kernels.floats import narrow, widen
from cswap_kernels.zfp import LARGEST, SMALLEST, block_bits, stream_bytes

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cswap.schema.tensor import DType

DEFAULT_RATE: Final = 16
"""Bits per value."""

MAX_RATE: Final = 64

_HEADER: Final = struct.Struct("<IIQ")  # _ZFP or _RAW, bits per block, words
_ZFP, _RAW = 0, 1

_PIECE: Final = 1 << 16
"""Values per call of zfpy. A call holds the GIL, for about a millisecond. The number is a multiple
of 64 blocks, so each call ends with a whole word of 64 bits, and the calls' streams join to one."""


class Zfp(Codec):
    """A fixed number of bits per value. The error of a single value has no bound.

    float16 and bfloat16 are widened to float32.

    Args:
        rate: bits per value, 1 to 64. Below 3, blocks of 4 values take the 9 (float64: 12) bits
            that zfp needs for their exponent.

    Raises:
        ConfigError: the rate is out of range, or zfpy is missing and there is no GPU.
    """

    lossless = False
    max_ratio = 22
    """256 / 12: float64 at the lowest rate."""

    def __init__(self, rate: int = DEFAULT_RATE) -> None:
        if not 1 <= rate <= MAX_RATE:
            raise ConfigError(f"codec='zfp:{rate}': the rate must be 1 to {MAX_RATE} bits.")
        self._zfpy: Any = None
        try:
            self._zfpy = importlib.import_module("zfpy")
        except ImportError as error:
            if gpu.missing() is not None:
                raise ConfigError(
                    f"codec='zfp': needs zfpy ({error}): {to_install('host')}"
                ) from error
        self.name = "zfp" if rate == DEFAULT_RATE else f"zfp:{rate}"
        self._rate = rate

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Floats and complex of two bytes per real number or more."""
        if dtype_name(dtype) not in FLOATS:
            return False
        if device == "cuda":
            return gpu.has_kernels("zfp", word_dtype(dtype).word)
        return device == "cpu" and self._zfpy is not None

    def bound(self, dtype: torch.dtype, numel: int) -> int:
        """Bytes of the header and of the raw values."""
        return _HEADER.size + numel * dtype.itemsize

    def encode_flat(
        self, x: torch.Tensor, out: torch.Tensor, *, key: EncodeKey, stream: Stream | None
    ) -> int | LateSize:
        """See `Codec.encode_flat`."""
        d = word_dtype(x.dtype)
        if x.is_cuda:
            return gpu.encode("zfp", d.word, x, out, self._cuda_args(d), cuda_stream(stream))
        words, target = words_of(x), bytes_of(out)
        bits = block_bits(self._rate, _itemsize(d))
        nbytes = stream_bytes(words.size, bits)
        raw = nbytes >= words.nbytes
        for first in range(0, 0 if raw else words.size, _PIECE):
            piece = _values(words[first : first + _PIECE], d)
            with np.errstate(invalid="ignore"):
                magnitudes = np.abs(piece)
                if not (magnitudes < LARGEST[piece.itemsize]).all():  # False for NaN, too
                    raw = True
                    break
                piece = np.where(magnitudes < SMALLEST[piece.itemsize], 0, piece)
            data = self._zfpy.compress_numpy(piece, rate=bits / 4, write_header=False)
            start = _HEADER.size + stream_bytes(first, bits)
            target[start : start + len(data)] = np.frombuffer(data, np.uint8)
        if raw:
            nbytes = words.nbytes
            target[_HEADER.size : _HEADER.size + nbytes] = words.view(np.uint8)
        header = _HEADER.pack(_RAW if raw else _ZFP, bits, words.size)
        target[: _HEADER.size] = np.frombuffer(header, np.uint8)
        return _HEADER.size + nbytes

    def decode_flat(
        self, payload: torch.Tensor, out: torch.Tensor, *, stream: Stream | None
    ) -> None:
        """See `Codec.decode_flat`."""
        d = word_dtype(out.dtype)
        if out.is_cuda:
            gpu.decode("zfp", d.word, payload, out, self._cuda_args(d), cuda_stream(stream))
            return
        words, source = words_of(out), bytes_of(payload)
        bits = block_bits(self._rate, _itemsize(d))
        sizes = {_RAW: words.nbytes}
        if stream_bytes(words.size, bits) < words.nbytes:
            sizes[_ZFP] = stream_bytes(words.size, bits)
        mode, found_bits, n_words = (
            _HEADER.unpack_from(source.data) if source.size >= _HEADER.size else (None, 0, 0)
        )
        data = source[_HEADER.size :]
        # zfpy trusts its input: only the exact size keeps it from reading beyond the end.
        if (found_bits, n_words, data.size) != (bits, words.size, sizes.get(mode)):
            raise CorruptEncodingError(
                f"zfp encoding of {source.size} bytes: not one of {words.size} words at {bits} "
                "bits per block."
            )
        if mode == _RAW:
            words.view(np.uint8)[:] = data
            return
        for first in range(0, words.size, _PIECE):
            piece = words[first : first + _PIECE]
            start = stream_bytes(first, bits)
            nbytes = stream_bytes(piece.size, bits)
            self._decode_piece(data[start : start + nbytes], piece, d, bits)

    def _cuda_args(self, d: DType) -> tuple[int, int]:
        return block_bits(self._rate, _itemsize(d)), float_kind(d)

    def _decode_piece(
        self, data: NDArray[np.uint8], words: NDArray[Any], d: DType, bits: int
    ) -> None:
        itemsize = _itemsize(d)
        x = words.view(f"f{itemsize}") if d.word == itemsize else np.empty(words.size, np.float32)
        kind = self._zfpy.type_double if itemsize == 8 else self._zfpy.type_float
        try:
            self._zfpy._decompress(data, kind, [x.size], out=x, rate=bits / 4)  # noqa: SLF001
        except RuntimeError as error:
            raise CorruptEncodingError(f"zfp: {error}") from error
        if d.word != itemsize:
            narrow(x, words, float_kind(d))


def _itemsize(d: DType) -> int:
    # Bytes of a value when zfp encodes it.
    return max(d.word, 4)


def _values(words: NDArray[Any], d: DType) -> NDArray[Any]:
    # Words as float32 or float64.
    return words.view(np.float64) if d.word == 8 else widen(words, float_kind(d))
