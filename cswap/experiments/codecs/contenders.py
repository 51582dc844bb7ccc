"""Codecs and peers on one tensor: encoded size, rates beside memcpy's, and the decoding error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.registry import get_codec, list_codecs
from cswap.errors import CswapError
from cswap.experiments.timing import Timing, interleaved
from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cswap.codecs.base import Codec
    from cswap.experiments.codecs.case import Case

MEMCPY: Final = "memcpy"
BLOSC: Final = "blosc2"

READING_BYTES: Final = 4 << 20
"""Bytes of memcpy per reading of the clock. 4 KiB alone take less than a microsecond, so the
clock's own calls would be measured."""

MOST_REPEATS: Final = 256

CHUNK: Final = 1 << 24
"""Number of elements that are compared in double precision at once."""


@dataclass(frozen=True, slots=True)
class Row:
    """One codec on one data set.

    Attributes:
        family: where the data come from.
        data: kind of tensor.
        zeros: share of zero elements that was asked for; None outside of the sparsity sweep.
        dtype: its dtype.
        codec: name, or a peer's.
        lossless: whether every bit comes back.
        nbytes: raw bytes.
        saved_bytes: bytes that these are a sample of.
        ratio: raw over encoded bytes.
        encode_gb_per_s: raw bytes per second, in 1e9.
        decode_gb_per_s: raw bytes per second, in 1e9.
        encode_of_memcpy: encode rate as a fraction of memcpy's rate in the same rounds.
        decode_of_memcpy: likewise.
        encode: seconds.
        decode: seconds.
        relative_rms_error: error of the decoded values; 0 if lossless.
    """

    family: str
    data: str
    zeros: float | None
    dtype: str
    codec: str
    lossless: bool
    nbytes: int
    saved_bytes: int
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    encode_of_memcpy: float
    decode_of_memcpy: float
    encode: Timing
    decode: Timing
    relative_rms_error: float


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that encodes and decodes one data set.

    Attributes:
        lossless: whether every bit comes back.
        nbytes: encoded bytes.
        encode: does it once.
        decode: does it once, into the buffer that all contenders share.
    """

    lossless: bool
    nbytes: int
    encode: Callable[[], object]
    decode: Callable[[], object]


def _codec(codec: Codec, x: torch.Tensor, out: torch.Tensor, back: torch.Tensor) -> Contender:
    size = codec.encode_flat(x, out, key=DEFAULT_KEY, stream=None)
    nbytes = size if isinstance(size, int) else size.value()
    payload = out[:nbytes].clone()
    return Contender(
        codec.lossless,
        nbytes,
        lambda: codec.encode_flat(x, out, key=DEFAULT_KEY, stream=None),
        lambda: codec.decode_flat(payload, back, stream=None),
    )


def _memcpy(x: torch.Tensor, out: torch.Tensor, back: torch.Tensor) -> Contender:
    copy, target = x.clone(), out[: x.nbytes].view(x.dtype)
    return Contender(True, x.nbytes, lambda: target.copy_(x), lambda: back.copy_(copy))


def _blosc(x: torch.Tensor, back: torch.Tensor) -> Contender | None:
    try:
        import blosc2
    except ImportError:
        return None
    source, target = x.view(torch.uint8).numpy(), back.view(torch.uint8).numpy()
    settings: dict[str, Any] = {
        "typesize": x.element_size(),
        "nthreads": torch.get_num_threads(),
        "clevel": 1,
    }
    packed = blosc2.compress2(source, codec=blosc2.Codec.ZSTD, **settings)
    return Contender(
        True,
        len(packed),
        lambda: blosc2.compress2(source, codec=blosc2.Codec.ZSTD, **settings),
        lambda: blosc2.decompress2(packed, dst=target, nthreads=torch.get_num_threads()),
    )


def _usable(names: tuple[str, ...], dtype: torch.dtype) -> Iterator[tuple[str, Codec]]:
    for name in names or list_codecs():
        try:
            codec = get_codec(name)
        except CswapError:  # its package is not installed: `cswap codecs` says which
            continue
        if codec.supports(dtype):
            yield name, codec


def measure(case: Case, rounds: int, names: tuple[str, ...]) -> list[Row]:
    """Measure memcpy and codecs on the case's tensor, in the same rounds.

    Buffers are shared, so that a gibibyte does not take fifteen.

    Args:
        case: the tensor, and which codecs it is for.
        rounds: counted rounds.
        names: codecs, instead of the case's own; empty for those.
    """
    x, wanted = case.make(), names or case.codecs
    codecs = dict(_usable(wanted, x.dtype))
    bounds = [codec.bound(x.dtype, x.numel()) for codec in codecs.values()]
    out = torch.empty(max([x.nbytes, *bounds]), dtype=torch.uint8)
    back = torch.empty_like(x)
    contenders = {MEMCPY: _memcpy(x, out, back)}
    contenders |= {name: _codec(codec, x, out, back) for name, codec in codecs.items()}
    peer = None if wanted else _blosc(x, back)
    if peer is not None:
        contenders[BLOSC] = peer
    repeats = min(MOST_REPEATS, max(1, READING_BYTES // x.nbytes))
    encodes = interleaved(
        {n: c.encode for n, c in contenders.items()}, rounds=rounds, repeats=repeats
    )
    decodes = interleaved(
        {n: c.decode for n, c in contenders.items()}, rounds=rounds, repeats=repeats
    )
    return [
        _row(case, x, name, c, encodes, decodes, _error(x, back, c))
        for name, c in contenders.items()
    ]


def _row(
    case: Case,
    x: torch.Tensor,
    codec: str,
    contender: Contender,
    encodes: dict[str, Timing],
    decodes: dict[str, Timing],
    error: float,
) -> Row:
    dtype, encode, decode = dtype_name(x.dtype), encodes[codec], decodes[codec]
    return Row(
        family=case.family,
        data=case.data,
        zeros=case.zeros,
        dtype=dtype,
        codec=codec,
        lossless=contender.lossless,
        nbytes=x.nbytes,
        saved_bytes=x.nbytes if case.saved_bytes is None else case.saved_bytes,
        ratio=x.nbytes / contender.nbytes,
        encode_gb_per_s=x.nbytes / encode.median_s / 1e9,
        decode_gb_per_s=x.nbytes / decode.median_s / 1e9,
        encode_of_memcpy=encodes[MEMCPY].median_s / encode.median_s,
        decode_of_memcpy=decodes[MEMCPY].median_s / decode.median_s,
        encode=encode,
        decode=decode,
        relative_rms_error=error,
    )


def _error(x: torch.Tensor, back: torch.Tensor, contender: Contender) -> float:
    back.view(torch.uint8).fill_(1)  # a result of another contender must not count for this one
    contender.decode()
    if contender.lossless:
        if not torch.equal(x.view(torch.uint8), back.view(torch.uint8)):
            raise RuntimeError("a lossless codec changed bits: no figure is reported")
        return 0.0
    pairs = zip(x.split(CHUNK), back.split(CHUNK), strict=True)
    squares = [
        (float((b.double() - a.double()).square().sum()), float(a.double().square().sum()))
        for a, b in pairs
    ]
    wrong, exact = (sum(column) for column in zip(*squares, strict=True))
    return 0.0 if wrong == 0 else float("inf") if exact == 0 else (wrong / exact) ** 0.5
