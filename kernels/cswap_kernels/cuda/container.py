"""The kernels around the tile functions: the tile container of cswap_kernels/tiles.py, on CUDA.

A format contributes two *device tile functions*. Blocks take tiles in turn; one block deals with
one tile, staged in shared memory. All threads of the block call them, converged:

    encode(x pointer to words [n], n i32, dst u8 pointer, tmp, a0, a1, a2, a3, first i64) -> i32
        Encode one tile into the start of dst; bytes, or -1 for "store it raw": the same in every
        thread. May write up to (raw bytes + SLACK) bytes of dst, and may overwrite x.
    decode(src u8 pointer, nbytes i32, x pointer to words [n], n i32, tmp, a0..a3, first i64) -> i32
        The inverse; 0, or -1 when src is no encoding of n words: the same in every thread. Must
        write every word of x, and nothing outside it. May read and write src up to (raw bytes +
        SLACK). src may be hostile.

x, dst and src are in shared memory and start at multiples of 16 bytes; tmp [TMP_WORDS] u32 too, and
is the function's own. What a function was given is there for every thread to read; what it leaves
behind must be: it ends with a ``syncthreads`` after its last write. a0..a3 are u64, the format's
parameters; first is the index of the tile's first word in the tensor.

Note [where a tile's segment goes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
One pass, no scan over blocks. Either at a fixed distance per tile (``stride`` > 0), or wherever an
atomic cursor says: dense, in whatever order the blocks finish. The directory says where, so both
are the same format and any decoder reads them; content is deterministic, order is not. The output
may be pinned host memory: 16-byte stores, whole lines per warp, so no copy follows. The last block
to finish writes the container's size to ``size`` (which may be pinned as well, so that nobody has
to ask the device for it) and resets the cursor for the next launch on the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from numba import cuda, int32, int64, types, uint8, uint32, uint64

from cswap_kernels.cuda.primitives import (
    as_u8,
    as_u16,
    as_u32,
    as_u64,
    atomic_add,
    atomic_max,
    load16,
    load_global16,
    store16,
    store_global16,
)
from cswap_kernels.tiles import SLACK, TILE_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable

    TileFunctions = tuple[Any, Any]
    MakeTile = Callable[[int, Any], TileFunctions]

THREADS: Final = 256
"""Threads per block unless the tuner knows better."""

TMP_WORDS: Final = 272
"""u32 of shared memory that tile functions may use: one per thread and some."""

CONTROL_WORDS: Final = 2
"""u64 per stream: the cursor, and how many blocks are done. Zero between launches."""

WORDS: Final[dict[int, tuple[Any, Any]]] = {
    1: (types.uint8, as_u8),
    2: (types.uint16, as_u16),
    4: (types.uint32, as_u32),
    8: (types.uint64, as_u64),
}
"""Word size: its type, and the view of memory as such words."""

_P = types.CPointer
_A = (types.uint64,) * 4


def encode_signature(word: int) -> Any:
    """words, out, control, size, n_words, stride, whether aligned, a0..a3."""
    return types.void(
        _P(WORDS[word][0]),
        _P(types.uint8),
        _P(types.uint64),
        _P(types.uint64),
        types.int64,
        types.int64,
        types.int32,
        *_A,
    )


def decode_signature(word: int) -> Any:
    """payload, its bytes, words, status, n_words, whether aligned, a0..a3."""
    return types.void(
        _P(types.uint8),
        types.int64,
        _P(WORDS[word][0]),
        _P(types.uint32),
        types.int64,
        types.int32,
        *_A,
    )


@cuda.jit(device=True)
def load_tile(words, first, n, log, aligned, x):
    """Stage words [first, first + n), of 2**log bytes each, in x. Ends with a syncthreads."""
    i, step = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    whole = int32(0)
    if aligned != int32(0):
        groups = int32(int32(n << log) >> int32(4))
        start = int64((first << int64(log)) >> int64(4))
        while i < groups:
            store16(x, i, load_global16(words, int64(start + int64(i))))
            i = int32(i + step)
        whole = int32(int32(groups << int32(4)) >> log)
    i = int32(whole + int32(cuda.threadIdx.x))
    while i < n:
        x[i] = words[int64(first + int64(i))]
        i = int32(i + step)
    cuda.syncthreads()


@cuda.jit(device=True)
def store_tile(x, n, log, aligned, words, first):
    """Inverse of `load_tile`. Ends with a syncthreads."""
    i, step = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    whole = int32(0)
    if aligned != int32(0):
        groups = int32(int32(n << log) >> int32(4))
        start = int64((first << int64(log)) >> int64(4))
        while i < groups:
            store_global16(words, int64(start + int64(i)), load16(x, i))
            i = int32(i + step)
        whole = int32(int32(groups << int32(4)) >> log)
    i = int32(whole + int32(cuda.threadIdx.x))
    while i < n:
        words[int64(first + int64(i))] = x[i]
        i = int32(i + step)
    cuda.syncthreads()


@cuda.jit(device=True)
def store_segment(dst, nbytes, out, at):
    """Copy nbytes of dst to out from byte ``at`` (a multiple of 16) on, padded with zeros."""
    thread = int32(cuda.threadIdx.x)
    padded = int32((nbytes + int32(15)) & int32(-16))
    if thread < int32(padded - nbytes):
        dst[int32(nbytes + thread)] = uint8(0)
    cuda.syncthreads()
    start = int64(at >> int64(4))
    i, groups = thread, int32(padded >> int32(4))
    while i < groups:
        store_global16(out, int64(start + int64(i)), load16(dst, i))
        i = int32(i + int32(cuda.blockDim.x))


@cuda.jit(device=True)
def place_segment(nbytes, raw, tile, base, stride, control, directory, place):
    """Where the segment goes: thread 0 decides and enters it, ``place`` tells the block."""
    if int32(cuda.threadIdx.x) == int32(0):
        if stride > int64(0):
            at = int64(base + int64(tile * stride))
        else:
            padded = uint64(int64((nbytes + int32(15)) & int32(-16)))
            at = int64(base + int64(atomic_add(control, 0, padded)))
        place[0] = at
        directory[int64(tile * int64(2))] = uint32(at >> int64(4))
        mark = uint32(0x80000000) if raw else uint32(0)
        directory[int64(tile * int64(2) + int64(1))] = uint32(uint32(nbytes) | mark)
    cuda.syncthreads()
    return place[0]


@cuda.jit(device=True)
def finish(control, size, base, stride, n_tiles, directory):
    """The last block writes the size, pads the directory and resets the cursor."""
    cuda.threadfence()
    cuda.syncthreads()
    if int32(cuda.threadIdx.x) == int32(0):
        done = uint64(atomic_add(control, 1, uint64(1)))
        if done == uint64(uint64(cuda.gridDim.x) - uint64(1)):
            used = uint64(atomic_add(control, 0, uint64(0)))
            control[0] = uint64(0)
            if stride > int64(0):
                used = uint64(n_tiles * stride)
            size[0] = uint64(uint64(base) + used)
            control[1] = uint64(0)
            if n_tiles & int64(1):
                directory[int64(n_tiles * int64(2))] = uint32(0)
                directory[int64(n_tiles * int64(2) + int64(1))] = uint32(0)


def encode_kernel(
    make_tile: MakeTile, word: int, tile_words: int | None = None
) -> Callable[..., None]:
    """The kernel that encodes a tensor of words of ``word`` bytes; see `encode_signature`.

    ``tile_words``, a power of two, is TILE_WORDS[word]; tests in the simulator want smaller tiles.

    ``out`` starts at a multiple of 16 bytes and holds `tiles.container_bound` of them, or those of
    the directory and n_tiles * stride. ``aligned`` says whether ``words`` does, too.
    """
    encode_tile, _ = make_tile(word, WORDS[word][1])
    as_words = WORDS[word][1]
    full = tile_words or TILE_WORDS[word]
    log, shift, x_u64 = word.bit_length() - 1, full.bit_length() - 1, full * word // 8
    segment_u64 = x_u64 + SLACK // 8

    def encode(words, out, control, size, n_words, stride, aligned, a0, a1, a2, a3):
        memory = cuda.shared.array(x_u64, uint64, alignment=16)
        output = cuda.shared.array(segment_u64, uint64, alignment=16)
        tmp = cuda.shared.array(TMP_WORDS, uint32, alignment=8)
        place = cuda.shared.array(1, int64)
        x, dst, directory = as_words(memory), as_u8(output), as_u32(out)
        n_tiles = int64((n_words + int64(full - 1)) >> int64(shift))
        base = int64(((n_tiles + int64(1)) >> int64(1)) << int64(4))
        tile = int64(cuda.blockIdx.x)
        while tile < n_tiles:
            first = int64(tile * int64(full))
            n = int32(min(int64(full), int64(n_words - first)))
            load_tile(words, first, n, int32(log), aligned, x)
            nbytes = encode_tile(x, n, dst, tmp, a0, a1, a2, a3, first)
            raw = nbytes < int32(0) or nbytes >= int32(n << int32(log))
            if raw:
                cuda.syncthreads()
                nbytes = int32(n << int32(log))
                load_tile(words, first, n, int32(log), aligned, as_words(dst))
            at = place_segment(nbytes, raw, tile, base, stride, control, directory, place)
            store_segment(dst, nbytes, out, at)
            cuda.syncthreads()
            tile = int64(tile + int64(cuda.gridDim.x))
        finish(control, size, base, stride, n_tiles, directory)

    return encode


@cuda.jit(device=True)
def load_segment(payload, start, nbytes, src):
    """Stage a segment in src. Ends with a syncthreads.

    The payload is padded to 16 bytes, like every segment: the last 16 bytes are all there.
    """
    first = int64(start >> int64(4))
    groups = int32((nbytes + int32(15)) >> int32(4))
    i = int32(cuda.threadIdx.x)
    while i < groups:
        store16(src, i, load_global16(payload, int64(first + int64(i))))
        i = int32(i + int32(cuda.blockDim.x))
    cuda.syncthreads()


def decode_kernel(
    make_tile: MakeTile, word: int, tile_words: int | None = None
) -> Callable[..., None]:
    """The kernel that decodes a container; see `decode_signature`.

    ``payload`` starts at a multiple of 16 bytes and is padded to one. ``status[0]`` is raised to
    the index of a corrupt tile + 1; words of that tile are left as they were.
    """
    _, decode_tile = make_tile(word, WORDS[word][1])
    as_words = WORDS[word][1]
    full = tile_words or TILE_WORDS[word]
    log, shift, x_u64 = word.bit_length() - 1, full.bit_length() - 1, full * word // 8
    segment_u64 = x_u64 + SLACK // 8

    def decode(payload, payload_bytes, words, status, n_words, aligned, a0, a1, a2, a3):
        memory = cuda.shared.array(x_u64, uint64, alignment=16)
        encoded = cuda.shared.array(segment_u64, uint64, alignment=16)
        tmp = cuda.shared.array(TMP_WORDS, uint32, alignment=8)
        x, src = as_words(memory), as_u8(encoded)
        directory = as_u32(payload)
        n_tiles = int64((n_words + int64(full - 1)) >> int64(shift))
        lowest = int64(((n_tiles + int64(1)) >> int64(1)) << int64(4))
        tile = int64(cuda.blockIdx.x)
        while tile < n_tiles:
            first = int64(tile * int64(full))
            n = int32(min(int64(full), int64(n_words - first)))
            start = int64(int64(directory[int64(tile * int64(2))]) << int64(4))
            entry = uint32(directory[int64(tile * int64(2) + int64(1))])
            raw = (entry & uint32(0x80000000)) != uint32(0)
            nbytes = int64(entry & uint32(0x7FFFFFFF))
            good = start >= lowest and int64(start + nbytes) <= payload_bytes
            good = good and nbytes <= int64(n * int32(word))
            if raw and nbytes != int64(n * int32(word)):
                good = False
            if good:
                load_segment(payload, start, int32(nbytes), src)
                if raw:
                    store_tile(as_words(src), n, int32(log), aligned, words, first)
                else:
                    done = decode_tile(src, int32(nbytes), x, n, tmp, a0, a1, a2, a3, first)
                    good = done == int32(0)
                    if good:
                        store_tile(x, n, int32(log), aligned, words, first)
            if not good and int32(cuda.threadIdx.x) == int32(0):
                atomic_max(status, 0, uint32(tile + int64(1)))
            cuda.syncthreads()
            tile = int64(tile + int64(cuda.gridDim.x))

    return decode
