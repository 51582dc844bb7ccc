"""``nvcomp-...``: NVIDIA's codecs, on a CUDA device (docs/format/nvcomp.md).

Only two kinds of calls wait for the device: `NvcompSize.value`, which the engine calls when the
encode has ended, and calls without a stream, which must be complete when they return.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from cswap.codecs import nvcomp_library
from cswap.codecs.base import Codec, EncodeKey, LateSize, Stream, word_dtype
from cswap.codecs.layout import copy_bytes
from cswap.codecs.nvcomp_container import HEADER_BYTES, TABLE_ENTRY, check_header
from cswap.codecs.nvcomp_library import CHUNK_BYTES, running_on
from cswap.codecs.nvcomp_size import NvcompSize
from cswap.codecs.nvcomp_traits import ANS_FLOATS, TRAITS
from cswap.codecs.nvcomp_trust import Trust
from cswap.codecs.tiled import cuda_stream
from cswap.errors import ConfigError, CorruptEncodingError, UnsupportedError
from cswap.schema.tensor import DTYPES, dtype_name

if TYPE_CHECKING:
    from cswap.schema.tensor import DType

ALIGN: Final = 16
"""Alignment of addresses in bytes: the strictest requirement among nvCOMP's algorithms."""

CONTAINER_BYTES: Final = 256
CHUNK_OVERHEAD: Final = 2 * TABLE_ENTRY + ALIGN
"""CONTAINER_BYTES and CHUNK_OVERHEAD are upper bounds of the bytes that nvCOMP adds to a payload
and to each of its chunks, with space for checksums."""


class NvcompCodec(Codec):
    """Base of nvCOMP's codecs. A subclass sets nvCOMP's name of the algorithm, and options.

    Attributes:
        algorithm: nvCOMP's name of the algorithm.
        max_chunk_bytes: largest encoding of a chunk of CHUNK_BYTES
            (nvcompBatched...CompressGetMaxOutputChunkSize of 6.0.0.12).
    """

    lossless = True
    late_payload = True  # a tensor that does not shrink is stored raw
    max_ratio = CHUNK_BYTES // TABLE_ENTRY  # a chunk takes at least its entry in the tables

    algorithm: str
    max_chunk_bytes: int

    def __init__(self) -> None:
        nvcomp_library.require(self.name)
        self._trust = Trust(self)

    def options(self, dtype: DType) -> dict[str, object] | None:
        """Options for nvCOMP and words of a dtype; None if the codec does not take the dtype.

        Default: none; the algorithm encodes bytes of any dtype.
        """
        return {}

    def has_outliers(self, x: torch.Tensor) -> torch.Tensor | None:
        """[] bool, on x's device: whether x must be stored raw. None: never."""
        return None

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """On a CUDA device only, as long as nvCOMP has not failed on the dtype."""
        found = DTYPES.get(dtype_name(dtype))
        takes = found is not None and self.options(found) is not None
        return device == "cuda" and takes and dtype not in self._trust.failed

    def bound(self, dtype: torch.dtype, numel: int) -> int:
        """Bytes that nvCOMP may need during encode. The payload is at most the raw bytes."""
        n_chunks = -(-numel * dtype.itemsize // CHUNK_BYTES)
        return CONTAINER_BYTES + n_chunks * (self.max_chunk_bytes + CHUNK_OVERHEAD)

    def encode_flat(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        key: EncodeKey,
        stream: Stream | None,
    ) -> int | LateSize:
        """See `Codec.encode_flat`."""
        if x.numel() == 0:
            return 0
        self._trust.prove(x.dtype, x.device)
        given = cuda_stream(stream)
        with running_on(given, x.device) as own:
            source = _aligned(x.view(torch.uint8))
            # nvCOMP takes only device memory, and `out` may be host memory.
            direct = out.device == x.device
            target = out if direct else torch.empty(out.numel(), dtype=torch.uint8, device=x.device)
            encoded = self._coder(x, own).encode(source, target)
            give_up = partial(self._trust.lose, x.dtype)
            size = NvcompSize(encoded, x.view(torch.uint8), target, out, self._outliers(x), give_up)
        if given is not None:
            return size
        own.synchronize()
        return size.value()

    def decode_flat(
        self, payload: torch.Tensor, out: torch.Tensor, *, stream: Stream | None
    ) -> None:
        """See `Codec.decode_flat`. With a stream, the payload's header is not checked."""
        nbytes = out.nbytes
        if payload.numel() != nbytes and not HEADER_BYTES <= payload.numel() < nbytes:
            raise CorruptEncodingError(
                f"codec {self.name!r}: payload of {payload.numel()} bytes for {nbytes} raw bytes."
            )
        if nbytes == 0:
            return
        if not on_gpu(out):
            if payload.numel() != nbytes:
                raise UnsupportedError(
                    f"payload on {payload.device}: codec {self.name!r} decodes on a GPU only. "
                    "Move encoding.payload there."
                )
            copy_bytes(out, payload, nbytes)
            return
        given = cuda_stream(stream)
        raw_out = out.view(torch.uint8)
        with running_on(given, out.device) as own:
            if payload.numel() == nbytes:
                raw_out.copy_(payload, non_blocking=True)
            else:
                if given is None:  # nvCOMP checks nothing, so the header is checked here
                    head = bytes(payload[:HEADER_BYTES].cpu().tolist())  # waits for these bytes
                    check_header(head, payload.numel(), nbytes)
                target = raw_out if _is_aligned(raw_out) else torch.empty_like(raw_out)
                self._coder(out, own).decode(_aligned(payload), target)
                if target is not raw_out:
                    raw_out.copy_(target)
        if given is None:
            own.synchronize()

    def _coder(self, x: torch.Tensor, stream: torch.cuda.Stream) -> nvcomp_library.Coder:
        dtype = word_dtype(x.dtype)
        index = x.device.index or 0

        def make() -> dict[str, object]:
            return {"algorithm": self.algorithm, **(self.options(dtype) or {})}

        return nvcomp_library.coder(make, f"{self.name} {dtype.name}", index, stream.cuda_stream)

    def _outliers(self, x: torch.Tensor) -> torch.Tensor | None:
        # Copied to the host in the order of the stream.
        found = self.has_outliers(x)
        if found is None:
            return None
        flag = torch.empty((), dtype=torch.bool, pin_memory=on_gpu(x))
        flag.copy_(found, non_blocking=True)
        return flag


class Ans(NvcompCodec):
    """nvCOMP ANS: entropy coding of floats' exponents; ``nvcomp-ans:1`` codes all bytes."""

    persistent = False  # NVIDIA changed the stream before, and again in 6.0
    algorithm = "ANS"
    max_chunk_bytes = 92720

    def __init__(self, symbol_bytes: int | None = None) -> None:
        if symbol_bytes not in (None, 1):
            raise ConfigError(
                f"codec='nvcomp-ans:{symbol_bytes}': 1, bytes for every dtype, is all there is."
            )
        self._bytewise = symbol_bytes == 1
        self.name = "nvcomp-ans:1" if self._bytewise else "nvcomp-ans"
        self.traits = TRAITS[self.name]
        super().__init__()

    def options(self, dtype: DType) -> dict[str, object]:
        """The data type that stands for the dtype."""
        return {"data_type": "|u1" if self._bytewise else _ans_type(dtype)}


def _ans_type(dtype: DType) -> str:
    if dtype.name == "float8_e4m3fn":
        return "|f1"
    # Also for bfloat16: nvCOMP's documentation defines <f2 for every format of 16 bits.
    return ANS_FLOATS.get(dtype.word, "|u1") if dtype.kind == "float" else "|u1"


class Bitcomp(NvcompCodec):
    """nvCOMP Bitcomp, its default algorithm: for numbers of similar magnitude."""

    name = "nvcomp-bitcomp"
    traits = TRAITS[name]
    algorithm = "Bitcomp"
    max_chunk_bytes = 65632
    _algorithm_type = 0

    def options(self, dtype: DType) -> dict[str, object]:
        """Words as unsigned integers, so that every bit comes back."""
        return {"data_type": _unsigned(dtype.word), "algorithm_type": self._algorithm_type}


class BitcompSparse(Bitcomp):
    """nvCOMP Bitcomp, its algorithm for data with many zeros."""

    name = "nvcomp-bitcomp-sparse"
    traits = TRAITS[name]
    _algorithm_type = 1


class Cascaded(NvcompCodec):
    """nvCOMP Cascaded: run lengths, differences and bit packing of integers."""

    name = "nvcomp-cascaded"
    traits = TRAITS[name]
    algorithm = "Cascaded"
    max_chunk_bytes = 65544

    def options(self, dtype: DType) -> dict[str, object]:
        """Words as unsigned integers, so that every bit comes back."""
        # All three encodings: without FOR, 6.0.0.12 refuses its default mode, and Python's default
        # has no FOR.
        known = nvcomp_library.library().CascadedFineGrainedEncoding
        encodings = int(known.DELTA) | int(known.RLE) | int(known.FOR)
        return {"data_type": _unsigned(dtype.word), "fine_grained_encodings": encodings}


class Lz4(NvcompCodec):
    """nvCOMP LZ4."""

    name = "nvcomp-lz4"
    traits = TRAITS[name]
    algorithm = "LZ4"
    max_chunk_bytes = 65800

    def options(self, dtype: DType) -> dict[str, object]:
        """The data type sets the alignment of matches. Every LZ4 decoder decodes the result."""
        return {"data_type": _unsigned(min(dtype.word, 4))}


class Snappy(NvcompCodec):
    """nvCOMP Snappy."""

    name = "nvcomp-snappy"
    traits = TRAITS[name]
    algorithm = "Snappy"
    max_chunk_bytes = 76490


class GDeflate(NvcompCodec):
    """nvCOMP GDeflate: Deflate, rearranged for GPUs."""

    name = "nvcomp-gdeflate"
    traits = TRAITS[name]
    algorithm = "GDeflate"
    max_chunk_bytes = 131360


class Deflate(NvcompCodec):
    """nvCOMP Deflate."""

    name = "nvcomp-deflate"
    traits = TRAITS[name]
    algorithm = "Deflate"
    max_chunk_bytes = 148256


class Zstd(NvcompCodec):
    """nvCOMP Zstandard."""

    name = "nvcomp-zstd"
    traits = TRAITS[name]
    algorithm = "Zstd"
    max_chunk_bytes = 65547


DEFAULT_STEP_EXPONENT: Final = -10


class BitcompLossy(NvcompCodec):
    """nvCOMP Bitcomp of values rounded to multiples of 2**k, for ``:k``; error: 2**(k-1)."""

    lossless = False
    algorithm = "Bitcomp"
    max_chunk_bytes = 65632

    def __init__(self, step_exponent: int | None = None) -> None:
        exponent = DEFAULT_STEP_EXPONENT if step_exponent is None else step_exponent
        self.name = "nvcomp-bitcomp-lossy"
        if step_exponent is not None:
            self.name += f":{step_exponent}"
        if not -126 <= exponent <= 127:
            raise ConfigError(
                f"codec={self.name!r}: values are rounded to multiples of 2**{exponent}; the "
                "exponent must be one of a normal float32, -126 to 127."
            )
        self.step = 2.0**exponent
        super().__init__()

    def options(self, dtype: DType) -> dict[str, object] | None:
        """Options for floats that nvCOMP supports and in which the step is a normal number."""
        real = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
        if dtype.name not in real:
            return None
        limits = torch.finfo(real[dtype.name])
        if not limits.smallest_normal <= self.step <= limits.max:
            return None
        return {
            "data_type": f"<f{dtype.word}",
            "algorithm_type": 0,
            "mode": nvcomp_library.library().BitcompMode.BITCOMP_LOSSY_FP_TO_SIGNED,
            "delta": self.step,
        }

    def has_outliers(self, x: torch.Tensor) -> torch.Tensor:
        """Whether a value is not finite, or its steps overflow an integer of the word's size."""
        limit = self.step * 2.0 ** (8 * x.itemsize - 2)
        low, high = torch.aminmax(x)
        return ~((high.double() < limit) & (low.double() > -limit))  # both are False for NaN


def _unsigned(word: int) -> str:
    return f"<u{word}" if word > 1 else "|u1"


def on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, where nvCOMP works."""
    return x.is_cuda


def _is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % ALIGN == 0


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if _is_aligned(x) else x.clone()
