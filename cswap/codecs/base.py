"""The contract of a codec, and the encoding that it produces.

A codec sees flat tensors only: one dimension, contiguous, of one of `DTYPES`. This module turns
strides, expanded dimensions and gaps into flat elements and back, so a codec implements its format
and nothing else.
"""

from __future__ import annotations

import abc
import operator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import torch

from cswap.codecs.header import read_stream, write_stream
from cswap.codecs.layout import (
    empty_flat,
    flat_numel,
    flatten,
    meta_of,
    restore,
    torch_dtype,
    unflatten_into,
)
from cswap.codecs.traits import CodecTraits
from cswap.errors import ConfigError, CorruptEncodingError, InternalError, UnsupportedError
from cswap.log import log
from cswap.schema.tensor import DTYPES, DType, TensorMeta, dtype_name


class Stream(Protocol):
    """A place in the order of execution: on a CPU a number of threads, on a GPU a CUDA stream.

    On a GPU it is a `torch.cuda.Stream`.
    """

    @property
    def threads(self) -> int:
        """Threads that a CPU codec may use; ignored on a GPU."""
        ...


class SharesMemory(Protocol):
    """An array of another library that others may use without a copy (DLPack)."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """See the DLPack standard."""
        ...


class LateSize(Protocol):
    """A size in bytes that is known only when the stream has finished the encode."""

    def value(self) -> int:
        """The size in bytes. Call it after the encode's event has fired.

        The payload is not written any more, unless the codec has a ``late_payload``.
        """
        ...


@dataclass(frozen=True, slots=True)
class EncodeKey:
    """Names one encode for counter-based stochastic rounding: equal keys give equal bytes.

    Attributes:
        seed: seed of the run.
        tensor_id: number of the saved tensor, the same in every step.
        step: number of the training step.
    """

    seed: int = 0
    tensor_id: int = 0
    step: int = 0


DEFAULT_KEY: Final = EncodeKey()

PART_SALT: Final = 0x9E3779B1
"""Sets the random numbers of a tensor's parts apart (2**32 over the golden ratio)."""


def part_key(seed: int, tensor_id: int, part: int, step: int) -> EncodeKey:
    """Names the encode of one part of a tensor. Args: part: its number; the others: `EncodeKey`."""
    return EncodeKey(seed, tensor_id + part * PART_SALT, step)


@dataclass(frozen=True, slots=True)
class Encoding:
    """The result of an encode; decode needs nothing else.

    Attributes:
        codec: name of the codec, as `cswap.get_codec` takes it.
        meta: layout of the encoded tensor.
        payload: [nbytes] uint8, the codec's bytes, on the device that encoded them.
        persistent: see `Codec.persistent`.
    """

    codec: str
    meta: TensorMeta
    payload: torch.Tensor
    persistent: bool = True

    @property
    def nbytes(self) -> int:
        """Encoded bytes, without header."""
        return self.payload.numel()

    @property
    def raw_nbytes(self) -> int:
        """Bytes before encoding: the distinct elements of the tensor."""
        return flat_numel(self.meta) * DTYPES[self.meta.dtype].itemsize

    @property
    def ratio(self) -> float:
        """Raw bytes over encoded bytes; above 1 is good."""
        return self.raw_nbytes / max(self.nbytes, 1)

    def to_bytes(self) -> bytes:
        """The stream: header and payload, with a checksum over both (docs/format.md).

        Raises:
            UnsupportedError: the tensor's gaps are too large, the codec's name is too long, or its
                format may change.
        """
        if not self.persistent:
            raise UnsupportedError(
                f"codec={self.codec!r}: its format changes with the library's version, so no "
                "stream is written. Use another codec for tensors that are to be stored."
            )
        return write_stream(self.codec, self.meta, self.payload)

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview) -> Encoding:
        """Read a stream back. Its codec is asked when it is decoded.

        Raises:
            CorruptEncodingError: ``data`` is truncated, damaged, or not a stream of cswap.
        """
        return Encoding(*read_stream(data))


class Codec(abc.ABC):
    """One format: a reversible or lossy map from a tensor's bytes to fewer bytes.

    A codec is stateless and reentrant. A subclass sets ``name``, ``lossless`` and ``max_ratio``,
    implements the four abstract methods, and may set the other attributes. It overrides nothing
    else.

    Attributes:
        name: name for `get_codec`, parameters included.
        lossless: whether decode returns every bit.
        max_ratio: no encoding is smaller than raw bytes / max_ratio, less a constant. A stream that
            claims more is corrupt. The limit keeps a hostile header from allocating memory.
        verbatim: whether an encoding is the tensor's own bytes, so that a plain copy replaces
            encode and decode.
        late_payload: whether a payload may change when its `LateSize` is asked for: it is not
            copied before that.
        persistent: whether an encoding may outlive the process, as a stream.
        traits: predicted ratio, error and speed, by which ``codec="auto"``, ``lossy=`` and the
            accuracy guard choose codecs.
    """

    name: str
    lossless: bool
    max_ratio: int
    verbatim: bool = False
    late_payload: bool = False
    persistent: bool = True
    traits: CodecTraits = CodecTraits()

    @abc.abstractmethod
    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Whether the codec encodes this dtype on this kind of device ("cpu", "cuda")."""

    @abc.abstractmethod
    def bound(self, dtype: torch.dtype, numel: int) -> int:
        """Largest encoding of ``numel`` elements, in bytes: the size that ``out`` must have."""

    @abc.abstractmethod
    def encode_flat(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        key: EncodeKey,
        stream: Stream | None,
    ) -> int | LateSize:
        """Encode x [n], contiguous, into out [>= bound] uint8, 16-byte aligned; return the size.

        On a GPU the call is asynchronous, and the size may be a `LateSize`.
        """

    @abc.abstractmethod
    def decode_flat(
        self, payload: torch.Tensor, out: torch.Tensor, *, stream: Stream | None
    ) -> None:
        """Decode payload [nbytes] uint8 into out [n], contiguous; write every element.

        Raises:
            CorruptEncodingError: payload is not an encoding of n elements of out's dtype.
        """

    def encode(
        self,
        tensor: torch.Tensor | SharesMemory,
        out: torch.Tensor | None = None,
        *,
        key: EncodeKey = DEFAULT_KEY,
        stream: Stream | None = None,
    ) -> Encoding:
        """Encode a tensor of any strided layout.

        Args:
            tensor: dense (strided) tensor; a dimension of stride 0 is encoded once. Or an array of
                another library that shares its memory by DLPack, such as CuPy's and NumPy's.
            out: [>= bound] uint8 to encode into, on the tensor's device, or pinned host memory for
                a tensor on a GPU. The encoding is a view of it. Default: newly allocated.
            key: names this encode for stochastic rounding.
            stream: stream of the work. Default: run immediately, with all threads.

        Raises:
            UnsupportedError: the codec does not take this dtype, device or layout; or the argument
                is no tensor and does not share its memory.
            ConfigError: ``out`` is no tensor, too small, not uint8, unaligned or on another device.
        """
        _refuse_array(out)
        tensor = _as_tensor(tensor)
        meta = meta_of(tensor)
        kind = tensor.device.type
        if not takes(self, tensor.dtype, kind):
            raise UnsupportedError(
                f"codec={self.name!r}: does not take {meta.dtype} on {kind}. "
                "`cswap codecs` lists the dtypes of each codec."
            )
        x = flatten(tensor)
        bound = checked_bound(self, x.dtype, x.numel())
        if out is None:
            out = torch.empty(bound, dtype=torch.uint8, device=x.device)
        elif not _takes(out, bound, x.device):
            raise ConfigError(
                f"out={out.dtype} of {out.numel()} elements on {out.device}: must be contiguous "
                f"uint8 of at least {bound} (codec.bound), 16-byte aligned, on {x.device}."
            )
        size = self.encode_flat(x, out, key=key, stream=stream)
        if isinstance(stream, torch.cuda.Stream):  # the size is known once the stream is done
            stream.synchronize()
        return Encoding(self.name, meta, out[: checked_size(self, size, bound)], self.persistent)

    def decode(
        self,
        encoding: Encoding,
        out: torch.Tensor | None = None,
        *,
        stream: Stream | None = None,
    ) -> torch.Tensor:
        """Rebuild the tensor with its exact sizes and strides.

        Args:
            encoding: result of `encode` or of `Encoding.from_bytes`.
            out: tensor of the same dtype and sizes to write to. Default: newly allocated.
            stream: stream of the work. Default: run immediately, with all threads.

        Raises:
            CorruptEncodingError: the encoding is damaged or was made by another codec.
            ConfigError: ``out`` has another dtype or shape, or expanded dimensions; ``encoding`` is
                something else.
        """
        if not isinstance(encoding, Encoding):
            raise ConfigError(
                f"encoding={type(encoding).__name__}: must be the result of encode, or of "
                "Encoding.from_bytes."
            )
        _refuse_array(out)
        if encoding.codec != self.name:
            raise CorruptEncodingError(
                f"encoding.codec={encoding.codec!r}: cannot be decoded by {self.name!r}."
            )
        meta = encoding.meta
        self.check(encoding.payload, meta)
        if out is not None and (
            out.dtype != torch_dtype(meta.dtype)
            or out.shape != meta.sizes
            or (out.stride() != meta.strides and _is_expanded(out))
        ):
            raise ConfigError(
                f"out={out.dtype} {tuple(out.shape)}, strides {out.stride()}: must be {meta.dtype} "
                f"{meta.sizes}, and no dimension expanded unless all strides are {meta.strides}."
            )
        x = empty_flat(flat_numel(meta), torch_dtype(meta.dtype), encoding.payload.device)
        self.decode_flat(encoding.payload, x, stream=stream)
        return restore(x, meta) if out is None else unflatten_into(x, meta, out)

    def check(self, payload: torch.Tensor, meta: TensorMeta) -> None:
        """Refuse a payload that cannot be an encoding of ``meta``, before memory is allocated.

        Raises:
            CorruptEncodingError: the layout claims more bytes than the codec can reach, or a dtype
                that the codec never encodes.
        """
        raw_bytes = flat_numel(meta) * DTYPES[meta.dtype].itemsize
        if raw_bytes > (payload.numel() + 1) * self.max_ratio:
            raise CorruptEncodingError(
                f"encoding of {payload.numel()} bytes claims {raw_bytes} raw bytes, more than "
                f"codec {self.name!r} can reach."
            )
        # Any device will do: the stream of a codec for GPUs is read into host memory first.
        dtype = torch_dtype(meta.dtype)
        if not (takes(self, dtype, "cpu") or takes(self, dtype, "cuda")):
            raise CorruptEncodingError(
                f"encoding.meta.dtype={meta.dtype!r}: codec {self.name!r} never encodes that."
            )

    def __repr__(self) -> str:
        return f"get_codec({self.name!r})"


def takes(codec: Codec, dtype: torch.dtype, device: str) -> bool:
    """Whether the codec supports this dtype and kind of device; False if ``supports`` raises."""
    try:
        return bool(codec.supports(dtype, device))
    except Exception:
        log.debug("%r.supports(%s, %r) failed", codec, dtype, device, exc_info=True)
        return False


def checked_bound(codec: Codec, dtype: torch.dtype, numel: int) -> int:
    """``codec.bound``, checked, since it becomes the size of an allocation.

    Raises:
        InternalError: ``bound`` returned something other than an int >= 0.
    """
    bound = codec.bound(dtype, numel)
    if not hasattr(bound, "__index__") or operator.index(bound) < 0:
        raise InternalError(f"codec {codec.name!r}: bound gave {bound!r}: must be an int >= 0.")
    return operator.index(bound)


def checked_size(codec: Codec, size: int | LateSize, bound: int) -> int:
    """The size that ``codec.encode_flat`` returned, in bytes; a `LateSize` is read.

    Raises:
        InternalError: the size is not an int >= 0, or is above the bound. A reader would then read
            memory that does not belong to the encoding.
    """
    nbytes: object = size.value() if hasattr(size, "value") else size
    if not hasattr(nbytes, "__index__") or not 0 <= operator.index(nbytes) <= bound:
        raise InternalError(
            f"codec {codec.name!r}: encode_flat gave {nbytes!r}: must be an int >= 0, in bytes; "
            f"{bound} are its bound."
        )
    return operator.index(nbytes)


def _as_tensor(x: object) -> torch.Tensor:
    # The same memory as a tensor.
    if isinstance(x, torch.Tensor):
        return x
    if not hasattr(x, "__dlpack__"):
        raise UnsupportedError(
            f"tensor={type(x).__name__}: must be a torch.Tensor, or an array with __dlpack__."
        )
    try:
        found: torch.Tensor = torch.from_dlpack(x)  # type: ignore[attr-defined]
    except (BufferError, RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"tensor={type(x).__name__}: does not share its memory ({error}); copy it first."
        ) from None
    return found


def _refuse_array(out: object) -> None:
    if out is not None and not isinstance(out, torch.Tensor):
        raise ConfigError(f"out={type(out).__name__}: must be a torch.Tensor.")


def _is_expanded(x: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(x.shape, x.stride(), strict=True))


def _takes(out: torch.Tensor, bound: int, device: torch.device) -> bool:
    # Whether ``out`` can be encoded into.
    return (
        out.dtype == torch.uint8
        and out.numel() >= bound
        and out.is_contiguous()
        and out.data_ptr() % 16 == 0
        and (out.device == device or (device.type == "cuda" and out.is_pinned()))
    )


@cache
def word_dtype(dtype: torch.dtype) -> DType:
    """The schema's description of a torch dtype.

    Raises:
        UnsupportedError: cswap does not know the dtype (quantised ones, for instance).
    """
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise UnsupportedError(f"dtype={name!r}: not encodable. Known: {', '.join(DTYPES)}.")
    return DTYPES[name]
