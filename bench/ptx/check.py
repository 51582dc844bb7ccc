"""Encodes and decodes in the interpreter, and compares with the CPU twins byte for byte."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.ptx.damage import damaged
from bench.ptx.data import UNSIGNED
from bench.ptx.device import STREAM, OneThread
from cswap.codecs import gpu
from cswap.codecs.base import EncodeKey, word_dtype
from cswap.codecs.tiled import TiledCodec
from cswap.errors import CorruptEncodingError
from cswap_kernels.tiles import TILE_WORDS, directory_bytes

if TYPE_CHECKING:
    from bench.ptx.device import Interpreted
    from cswap.codecs.base import Codec

Words = NDArray[Any]
Bytes = NDArray[np.uint8]

KEY: Final = EncodeKey(seed=0x123456789ABCDEF0, tensor_id=5, step=7)
JUNK: Final = 0x5A
"""Contents of results before a decode."""


class MismatchError(Exception):
    """The interpreter and the CPU twin differ."""


class Checker:
    """Round trips and damaged payloads of one codec and dtype.

    Attributes:
        notes: the interpreter's, by direction; "refused": of damaged payloads that were.
        n_checked: round trips and damaged payloads so far.
    """

    def __init__(self, device: Interpreted, codec: Codec, dtype: torch.dtype) -> None:
        self.notes: dict[str, Counter[str]] = defaultdict(Counter)
        self.n_checked: Counter[str] = Counter()
        self._device, self._codec, self._dtype = device, codec, dtype
        self._word = word_dtype(dtype).word
        self._tile = TILE_WORDS[self._word] if isinstance(codec, TiledCodec) else 0

    def kernel(self, direction: str) -> str:
        """Name of the kernel."""
        return f"{self._format()}-{self._word}-{direction}"

    def round_trip(self, words: Words, *, offset: int = 0, shift: int = 0) -> Bytes:
        """Both twins encode the same bytes, and read each other's; the CPU's payload.

        Args:
            words: [n] unsigned.
            offset: bytes by which they and the result are off their alignment.
            shift: bytes by which the payload is.

        Raises:
            MismatchError: they do not.
        """
        self._device.fresh()
        theirs, ours = self._encode_cpu(words), self._encode(words, offset)
        self._take_notes("encode")
        self._compare_payloads(ours, theirs, words.size)
        want, error = self._decode_cpu(ours, words.size)
        if error is not None:
            raise MismatchError(f"the CPU refuses: {error}")
        if self._codec.lossless and not np.array_equal(want, words):
            raise MismatchError("the CPU decodes other words than were encoded")
        for payload in (ours,) if ours.tobytes() == theirs.tobytes() else (ours, theirs):
            found, status, written = self._decode(payload, words.size, offset, shift)
            self._take_notes("decode")
            if status or not written.all():
                raise MismatchError(f"decode: status {status}, {int((~written).sum())} unwritten")
            if not np.array_equal(found, want):
                raise MismatchError(f"decode: {_first_difference(found, want)}")
        self.n_checked["round trips"] += 1
        return theirs

    def damage(self, payload: Bytes, n: int, rng: np.random.Generator, count: int) -> int:
        """Both twins refuse a damaged payload, or both accept it and agree; how many are refused.

        NaN of 4 and 8 bytes may differ in its bits, see docs/format/lossy.md.

        Raises:
            MismatchError: they do not agree, or a tile was written in part.
        """
        refused = 0
        for bad, what in damaged(payload, n, self._word, self._tile, rng, count):
            if self._tile and bad.size < 8 * -(-n // self._tile):
                continue  # the library refuses it before a launch
            self._device.fresh()
            want, error = self._decode_cpu(bad, n)
            found, status, written = self._decode(bad, n)
            self._take_notes("refused" if status else "decode")
            self.n_checked["damaged"] += 1
            if (error is None) != (status == 0):
                raise MismatchError(f"damage ({what}): status {status}, CPU {error}")
            if error is None:
                if not self._same_but_nan(found, want):
                    raise MismatchError(f"damage ({what}): {_first_difference(found, want)}")
                continue
            refused += 1
            self._check_tiles(written, n, what)
            one = what.startswith("one ") and self._tile
            if one and f"tile {status - 1} " not in str(error):
                raise MismatchError(f"damage ({what}): status {status}, CPU {error}")
        return refused

    def _format(self) -> str:
        return self._codec.cuda_format if isinstance(self._codec, TiledCodec) else "zfp"

    def _args(self, key: EncodeKey) -> list[int]:
        d = word_dtype(self._dtype)
        if isinstance(self._codec, TiledCodec):
            return [int(a) for a in self._codec.cuda_args(d, key)]
        return list(self._codec._cuda_args(d))  # type: ignore[attr-defined] # noqa: SLF001

    def _place(self, data: Words, offset: int) -> torch.Tensor:
        # In the interpreter's memory, read-only.
        made = self._device.memory.allocate(data.nbytes, offset)
        made.data[:] = data.view(np.uint8)
        made.flags[:] = 7
        return torch.from_numpy(made.data)

    def _encode(self, words: Words, offset: int) -> Bytes:
        x = self._place(words, offset).view(self._dtype)
        out = self._device.memory.allocate(self._codec.bound(self._dtype, words.size))
        payload = torch.from_numpy(out.data)
        size = gpu.encode(self._format(), self._word, x, payload, self._args(KEY), STREAM)
        nbytes = size.value()
        if self._device.control(STREAM).any():
            raise MismatchError("control words are not zero after a launch")
        if not 0 <= nbytes <= out.data.size:
            raise MismatchError(f"size {nbytes}, bound {out.data.size}")
        unwritten = out.flags[:nbytes] & 2 == 0
        if unwritten.any():
            raise MismatchError(f"byte {int(np.argmax(unwritten))} of the payload is not written")
        return out.data[:nbytes].copy()

    def _decode(
        self, payload: Bytes, n: int, offset: int = 0, shift: int = 0
    ) -> tuple[Words, int, NDArray[np.bool_]]:
        # (words, status, which bytes of them were written)
        source = self._place(payload, shift)
        out = self._device.memory.allocate(n * self._word, offset)
        out.data[:] = JUNK
        self._device.status.zero_()
        x = torch.from_numpy(out.data).view(self._dtype)
        gpu.decode(self._format(), self._word, source, x, self._args(EncodeKey()), STREAM)
        words = out.data.view(UNSIGNED[self._word]).copy()
        return words, int(self._device.status.item()), out.flags & 2 != 0

    def _encode_cpu(self, words: Words) -> Bytes:
        bound = self._codec.bound(self._dtype, words.size)
        x = torch.from_numpy(words.copy()).view(self._dtype)
        out = _aligned(bound)
        size = self._codec.encode_flat(x, out, key=KEY, stream=OneThread())
        nbytes = size if isinstance(size, int) else size.value()
        return out[:nbytes].numpy().copy()

    def _decode_cpu(self, payload: Bytes, n: int) -> tuple[Words, CorruptEncodingError | None]:
        source = _aligned(payload.size)[: payload.size]
        source.numpy()[:] = payload
        out = np.full(n * self._word, JUNK, np.uint8).view(UNSIGNED[self._word])
        try:
            x = torch.from_numpy(out).view(self._dtype)
            self._codec.decode_flat(source, x, stream=OneThread())
        except CorruptEncodingError as error:
            return out, error
        return out, None

    def _compare_payloads(self, ours: Bytes, theirs: Bytes, n: int) -> None:
        if ours.size != theirs.size:
            raise MismatchError(f"encode: {ours.size} bytes, CPU {theirs.size}")
        if not self._tile or self._device.launched[0] == 1:
            if ours.tobytes() != theirs.tobytes():
                raise MismatchError(f"encode: {_first_difference(ours, theirs)}")
            return
        n_tiles = -(-n // self._tile)
        both = zip(_segments(ours, n_tiles), _segments(theirs, n_tiles), strict=True)
        for k, ((raw, segment), (raw_cpu, segment_cpu)) in enumerate(both):
            if (raw, segment.size) != (raw_cpu, segment_cpu.size):
                raise MismatchError(
                    f"encode, tile {k}: raw {raw}, {segment.size} bytes; "
                    f"CPU raw {raw_cpu}, {segment_cpu.size} bytes"
                )
            if not np.array_equal(segment, segment_cpu):
                raise MismatchError(f"encode, tile {k}: {_first_difference(segment, segment_cpu)}")

    def _same_but_nan(self, found: Words, want: Words) -> bool:
        other = found != want
        if not other.any() or self._word == 2 or self._codec.lossless:
            return not other.any()
        nan = [torch.from_numpy(w[other]).view(self._dtype).isnan().all() for w in (found, want)]
        self.notes["decode"]["damaged payload: both decode to NaN, other bits"] += 1
        return all(bool(n) for n in nan)

    def _check_tiles(self, written: NDArray[np.bool_], n: int, what: str) -> None:
        # A tile that is refused is not written, or it is as a whole, before the other was.
        step = (self._tile or max(1, n)) * self._word
        for start in range(0, written.size, step):
            mine = written[start : start + step]
            if mine.any() and not mine.all():
                raise MismatchError(f"damage ({what}): tile {start // step} is written in part")

    def _take_notes(self, direction: str) -> None:
        for report in self._device.reports:
            self.notes[direction].update(report.notes)
        self._device.reports.clear()


def _aligned(nbytes: int) -> torch.Tensor:
    memory = torch.empty(nbytes + 64, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 16 :]


def _segments(payload: Bytes, n_tiles: int) -> list[tuple[bool, Bytes]]:
    # (raw?, segment) of each tile; they must lie densely, in any order, with zeros between them.
    entries = payload[: 8 * n_tiles].view(np.uint32).reshape(n_tiles, 2).astype(np.int64)
    starts, sizes = 16 * entries[:, 0], entries[:, 1] & 0x7FFFFFFF
    at = directory_bytes(n_tiles)
    if payload[8 * n_tiles : at].any():
        raise MismatchError("the directory's padding is not zero")
    for k in np.lexsort((sizes, starts)):  # empty segments first
        if starts[k] != at:
            raise MismatchError(f"the segment of tile {k} is at {starts[k]}, not {at}")
        end = at + int(sizes[k])
        at += -(-int(sizes[k]) // 16) * 16
        if payload[end:at].any():
            raise MismatchError(f"the padding of tile {k} is not zero")
    if at != payload.size:
        raise MismatchError(f"segments end at {at}, the payload at {payload.size}")
    return [
        (bool(entry >> 31), payload[start : start + size])
        for start, size, entry in zip(starts, sizes, entries[:, 1], strict=True)
    ]


def _first_difference(found: Words, want: Words) -> str:
    wrong = found != want
    k = int(np.argmax(wrong))
    return f"{int(wrong.sum())} differ, the first at {k}: {int(found[k]):#x}, CPU {int(want[k]):#x}"
