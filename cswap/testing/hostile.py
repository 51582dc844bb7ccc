"""Checks a codec with damaged and forged streams and payloads."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from cswap.codecs.base import Codec, Encoding
from cswap.codecs.header import write_stream
from cswap.errors import CorruptEncodingError
from cswap.schema.tensor import DTYPES, TensorMeta
from cswap.testing.buffers import Guarded, fail_unless
from cswap.testing.strategies import TensorSpec, values_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N_MUTATIONS: Final = 40
"""Number of bit flips, and number of random damages, per payload."""

FRONT_BITS: Final = 1000
"""Bits at the front that may be flipped: the directory and the beginning of the first tile."""


def check_hostile(codec: Codec, dtype: str) -> None:
    """Damage payloads of one dtype in many ways, and decode them.

    Raises:
        AssertionError: a forged header was accepted, or a damaged payload did harm.
    """
    small = codec.encode(TensorSpec(dtype, (2, 9), "permuted", "sparse").build())
    _check_claims(codec, small)
    fail_unless(
        _is_refused(lambda: codec.decode(Encoding("another", small.meta, small.payload))),
        f"{codec!r} decoded another codec's encoding",
    )
    rng = np.random.default_rng(0)
    for values in values_for(dtype):
        for numel in (20, 24 * 1024 // DTYPES[dtype].itemsize):  # the second: two or three tiles
            x = TensorSpec(dtype, (numel,), values=values).build()
            for damaged in _damages(codec.encode(x).payload.numpy(), rng):
                _check_payload(codec, dtype, numel, damaged)
    for bit in range(8 * small.nbytes):
        _check_payload(codec, dtype, small.meta.numel, _flipped(small.payload.numpy(), bit))


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except CorruptEncodingError:
        return True
    return False


def check_streams(encoding: Encoding) -> None:
    """Check that the reader refuses every truncated, flipped, extended and foreign stream.

    Raises:
        AssertionError: the reader accepted one of them.
    """
    stream = encoding.to_bytes()
    what = str(encoding)  # prints elements, which takes longer than a check
    for end in range(len(stream)):
        refused = _is_refused(lambda end=end: Encoding.from_bytes(stream[:end]))  # type: ignore[misc]
        fail_unless(refused, f"{what}: accepted when cut to {end} bytes")
    for bit in range(8 * len(stream)):
        flipped = bytearray(stream)
        flipped[bit // 8] ^= 1 << bit % 8
        refused = _is_refused(lambda data=flipped: Encoding.from_bytes(data))  # type: ignore[misc]
        fail_unless(refused, f"{what}: accepted with bit {bit} flipped")
    for foreign in (stream + b"\0", stream + stream, b"\x89PNG\r\n\x1a\n" + stream, bytes(1000)):
        refused = _is_refused(lambda data=foreign: Encoding.from_bytes(data))  # type: ignore[misc]
        fail_unless(refused, f"{what}: accepted {len(foreign)} foreign bytes")


def _check_claims(codec: Codec, encoding: Encoding) -> None:
    # Headers with a valid checksum that claim more elements than the payload can hold.
    most = (encoding.nbytes + 1) * codec.max_ratio
    for sizes, strides in (
        ((most + 1,), (1,)),
        ((2**40,), (1,)),
        ((2**20, 2**20), (2**20, 1)),
        ((2,), (2**50,)),
        ((2**62,) * 3, (0, 0, 0)),
    ):
        meta = TensorMeta(encoding.meta.dtype, sizes, strides)
        # Written directly as bytes, because Encoding.to_bytes refuses some of these.
        refused = _is_refused(
            lambda meta=meta: codec.decode(Encoding.from_bytes(forge(encoding, meta)))  # type: ignore[misc]
        )
        fail_unless(refused, f"{codec!r}: accepted a payload of {encoding.nbytes} bytes as {meta}")


def forge(encoding: Encoding, meta: TensorMeta) -> bytes:
    """Make a stream with a valid checksum and a layout that is not its encoding's."""
    small = TensorMeta(meta.dtype, (1,) * len(meta.sizes), (1,) * len(meta.sizes))
    stream = bytearray(write_stream(encoding.codec, small, encoding.payload))
    n_dims = len(meta.sizes)
    struct.pack_into(f"<{2 * n_dims}Q", stream, 24, *meta.sizes, *meta.strides)
    struct.pack_into("<I", stream, 4, zlib.crc32(stream[8:]))
    return bytes(stream)


def _damages(payload: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
    n = payload.size
    yield from (payload[:end] for end in {*range(min(n, 20)), n // 2, max(n - 1, 0)})
    yield np.concatenate((payload, payload))
    yield from (np.full(n, fill, np.uint8) for fill in (0, 0x7F, 0x80, 0xFF))
    if n == 0:
        return
    for bit in rng.integers(0, min(8 * n, FRONT_BITS), N_MUTATIONS):
        yield _flipped(payload, int(bit))
    for _ in range(N_MUTATIONS):
        damaged = payload.copy()
        first = int(rng.integers(n))
        last = first + int(rng.integers(1, 9))
        damaged[first:last] = rng.integers(0, 256, damaged[first:last].size)
        yield damaged


def _flipped(payload: np.ndarray, bit: int) -> np.ndarray:
    damaged = payload.copy()
    damaged[bit // 8] ^= 1 << bit % 8
    return damaged


def _check_payload(codec: Codec, dtype: str, numel: int, damaged: np.ndarray) -> None:
    # A damaged payload may be refused or decoded to any values. Decode must not read behind the
    # payload or write outside the output.
    found = [_decode_with(codec, dtype, numel, damaged, behind) for behind in (0x00, 0xFF)]
    same = (found[0] is None) == (found[1] is None)
    if found[0] is not None and found[1] is not None:
        same = torch.equal(found[0], found[1])
    fail_unless(
        same, f"{codec!r}: decode depends on what follows a payload of {damaged.size} bytes"
    )


def _decode_with(
    codec: Codec, dtype: str, numel: int, damaged: np.ndarray, behind: int
) -> torch.Tensor | None:
    memory = np.full(damaged.size + 256, behind, np.uint8)
    memory[: damaged.size] = damaged
    payload = torch.from_numpy(memory)[: damaged.size]
    guarded = Guarded(numel * DTYPES[dtype].itemsize, 0xA5)
    x = guarded.inside.view(getattr(torch, dtype))
    refused = _is_refused(lambda: codec.decode_flat(payload, x, stream=None))
    fail_unless(
        guarded.intact, f"{codec!r}: a damaged payload was decoded to outside of its output"
    )
    return None if refused else guarded.inside
