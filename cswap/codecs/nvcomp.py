"""``nvcomp-...``: NVIDIA's codecs, on a CUDA device (docs/format/nvcomp.md).

Only two kinds of calls wait for the device: `NvcompSize.value`, which the engine calls when the
encode has ended, and calls without a stream, which must be complete when they return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from cswap.codecs.traits import CodecTraits
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


Options = Mapping[str, object]
"""Keyword arguments of ``nvidia.nvcomp.Codec``."""


class NvcompCodec(Codec):
    """One of nvCOMP's codecs; `make` makes them.

    Args:
        name: of the codec.
        algorithm: nvCOMP's name of it.
        max_chunk_bytes: largest encoding of a chunk of CHUNK_BYTES
            (nvcompBatched...CompressGetMaxOutputChunkSize of 6.0.0.12).
        options: for nvCOMP and words of a dtype; None if the codec does not take the dtype.
        step: of a lossy codec, to whose multiples values are rounded; None: every bit comes back.

    Raises:
        ConfigError: nvCOMP cannot be used here.
    """

    late_payload = True  # a tensor that does not shrink is stored raw
    max_ratio = CHUNK_BYTES // TABLE_ENTRY  # a chunk takes at least its entry in the tables

    def __init__(
        self,
        name: str,
        algorithm: str,
        max_chunk_bytes: int,
        options: Callable[[DType], Options | None],
        step: float | None = None,
    ) -> None:
        nvcomp_library.require(name)
        self.name, self.lossless = name, step is None
        self.traits = TRAITS.get(name, CodecTraits())
        self.persistent = algorithm != "ANS"  # NVIDIA changed its stream before, and again in 6.0
        self.options, self.step = options, step
        self.algorithm, self.max_chunk_bytes = algorithm, max_chunk_bytes
        self._trust = Trust(self)

    def has_outliers(self, x: torch.Tensor) -> torch.Tensor | None:
        """[] bool, on x's device: whether x must be stored raw. None: never.

        Of a lossy codec: a value is not finite, or overflows when it counts in steps.
        """
        if self.step is None:
            return None
        limit = self.step * 2.0 ** (8 * x.itemsize - 2)
        low, high = torch.aminmax(x)
        return ~((high.double() < limit) & (low.double() > -limit))  # both are False for NaN

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


def _ans_type(dtype: DType) -> str:
    # Codes the exponents of floats, else all bytes.
    if dtype.name == "float8_e4m3fn":
        return "|f1"
    # Also for bfloat16: nvCOMP's documentation defines <f2 for every format of 16 bits.
    return ANS_FLOATS.get(dtype.word, "|u1") if dtype.kind == "float" else "|u1"


def _bitcomp(dtype: DType, algorithm_type: int) -> Options:
    # Words as unsigned integers, so that every bit comes back.
    return {"data_type": _unsigned(dtype.word), "algorithm_type": algorithm_type}


def _cascaded(dtype: DType) -> Options:
    # All three encodings: without FOR, 6.0.0.12 refuses its default mode, and Python's default has
    # no FOR.
    known = nvcomp_library.library().CascadedFineGrainedEncoding
    encodings = int(known.DELTA) | int(known.RLE) | int(known.FOR)
    return {"data_type": _unsigned(dtype.word), "fine_grained_encodings": encodings}


def _bytes(_: DType) -> Options:
    return {}  # the algorithm encodes bytes of any dtype


_ROWS: Final[dict[str, tuple[str, int, Callable[[DType], Options]]]] = {
    "nvcomp-ans": ("ANS", 92720, lambda d: {"data_type": _ans_type(d)}),
    "nvcomp-ans:1": ("ANS", 92720, lambda _: {"data_type": "|u1"}),
    "nvcomp-bitcomp": ("Bitcomp", 65632, lambda d: _bitcomp(d, 0)),
    "nvcomp-bitcomp-sparse": ("Bitcomp", 65632, lambda d: _bitcomp(d, 1)),  # for many zeros
    "nvcomp-cascaded": ("Cascaded", 65544, _cascaded),
    # The data type sets the alignment of matches. Every LZ4 decoder decodes the result.
    "nvcomp-lz4": ("LZ4", 65800, lambda d: {"data_type": _unsigned(min(d.word, 4))}),
    "nvcomp-snappy": ("Snappy", 76490, _bytes),
    "nvcomp-gdeflate": ("GDeflate", 131360, _bytes),
    "nvcomp-deflate": ("Deflate", 148256, _bytes),
    "nvcomp-zstd": ("Zstd", 65547, _bytes),
}
"""Lossless codecs: algorithm, largest encoding of a chunk, and options; see `NvcompCodec`."""

LOSSY: Final = "nvcomp-bitcomp-lossy"
"""Bitcomp of values rounded to multiples of 2**k, for ``:k``; error: 2**(k-1)."""

DEFAULT_STEP_EXPONENT: Final = -10


def make(family: str, parameter: int | None = None) -> NvcompCodec:
    """The codec of a name without and with a parameter.

    Raises:
        ConfigError: a wrong parameter, or nvCOMP cannot be used here.
        TypeError: the codec takes no parameter.
    """
    name = family if parameter is None else f"{family}:{parameter}"
    if family == LOSSY:
        return _lossy(name, DEFAULT_STEP_EXPONENT if parameter is None else parameter)
    if name not in _ROWS:
        if family == "nvcomp-ans":
            raise ConfigError(f"codec={name!r}: 1, bytes for every dtype, is all there is.")
        raise TypeError(name)
    return NvcompCodec(name, *_ROWS[name])


def _lossy(name: str, exponent: int) -> NvcompCodec:
    if not -126 <= exponent <= 127:
        raise ConfigError(
            f"codec={name!r}: values are rounded to multiples of 2**{exponent}; the exponent must "
            "be one of a normal float32, -126 to 127."
        )
    step = 2.0**exponent
    return NvcompCodec(name, "Bitcomp", 65632, partial(_lossy_options, step=step), step)


def _lossy_options(dtype: DType, *, step: float) -> Options | None:
    # Of floats that nvCOMP supports and in which the step is a normal number.
    real = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
    if dtype.name not in real:
        return None
    limits = torch.finfo(real[dtype.name])
    if not limits.smallest_normal <= step <= limits.max:
        return None
    return {
        "data_type": f"<f{dtype.word}",
        "algorithm_type": 0,
        "mode": nvcomp_library.library().BitcompMode.BITCOMP_LOSSY_FP_TO_SIGNED,
        "delta": step,
    }


def _unsigned(word: int) -> str:
    return f"<u{word}" if word > 1 else "|u1"


def on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, where nvCOMP works."""
    return x.is_cuda


def _is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % ALIGN == 0


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if _is_aligned(x) else x.clone()
