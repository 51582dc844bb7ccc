"""The kernels around the tile functions: the tile container of cswap_kernels/tiles.py, on CUDA.

A format contributes three *device tile functions*. Blocks take tiles in turn. One block encodes or
decodes one tile, which it has in shared memory. All its threads call the functions, converged:

    measure(x pointer to words [n], n i32, dst u8 pointer, tmp, a0, a1, a2, a3, first i64)
            -> (i32, state)
        The bytes of the tile's encoding, or -1 for "store it raw", the same in every thread; and a
        tuple of numbers for `write`. May write dst and tmp, and may overwrite x.
    write(x, n, dst, tmp, state, a0, a1, a2, a3, first)
        Write the encoding to the start of dst. Called right after `measure`, unless the tile is
        stored raw.
    decode(src u8 pointer, nbytes i32, x pointer to words [n], n i32, tmp, a0..a3, first i64) -> i32
        The inverse; 0, or -1 when src is no encoding of n words: the same in every thread. Must
        write every word of x. May read and write src up to (raw bytes + SLACK). src may be hostile.

x, dst and src are in shared memory and start at multiples of 16 bytes. dst and src have room for
(raw bytes of a full tile + SLACK), x for a full tile, of which n words count. tmp [TMP_WORDS] u32
is the functions' own. Every thread can read a function's arguments. `measure` and
`decode` end with a ``syncthreads`` after their last access; `write` need not, but where it wrote
behind the encoding's end. a0..a3 are u64, the format's parameters; first is the index of the tile's
first word in the tensor.

Note [a tile is encoded in two steps]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where a segment goes is known when an atomic addition to the cursor has come back, about a
microsecond after the size was known. So the size comes first (`measure`), and the block writes the
encoding while the addition is on its way.

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
    advance,
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
from cswap_kernels.cuda.warps import TMP_WORDS, padded
from cswap_kernels.tiles import SLACK, TILE_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable

    TileFunctions = tuple[Any, Any, Any]
    MakeTile = Callable[[int, Any], TileFunctions]

THREADS: Final = 256
"""Threads per block unless the tuner knows better."""

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
    own = (_P(WORDS[word][0]), _P(types.uint8), _P(types.uint64), _P(types.uint64))
    return types.void(*own, types.int64, types.int64, types.int32, *_A)


def decode_signature(word: int) -> Any:
    """payload, its bytes, words, status, n_words, whether aligned, a0..a3."""
    payload, words = (_P(types.uint8), types.int64), (_P(WORDS[word][0]), _P(types.uint32))
    return types.void(*payload, *words, types.int64, types.int32, *_A)


def in_one_step(encode: Any) -> tuple[Any, Any]:
    """(measure, write) of a format whose size is known only when the encoding is written.

    Args:
        encode: as `measure`, but returns the bytes alone, and leaves the encoding in dst.
    """

    @cuda.jit(device=True)
    def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
        return encode(x, n, dst, tmp, a0, a1, a2, a3, first), (int32(0),)

    @cuda.jit(device=True)
    def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
        return

    return measure, write


@cuda.jit(device=True)
def load_groups(source, start, groups, x):
    """Copy groups of 16 bytes from global memory, from group ``start`` (i64) on, to the start of x.

    Four loads are on their way at a time: each takes a thousand cycles or so to come.
    """
    i, step = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    first = advance(as_u8(source), int64(int64(start + int64(i)) << int64(4)))
    wide = int64(int64(step) << int64(4))
    target = int32(step << int32(2))
    while int32(i + int32(step * int32(3))) < groups:
        second = advance(first, wide)
        third = advance(second, wide)
        fourth = advance(third, wide)
        a, b = load_global16(first, 0), load_global16(second, 0)
        c, d = load_global16(third, 0), load_global16(fourth, 0)
        store16(x, i, a)
        store16(x, int32(i + step), b)
        store16(x, int32(i + int32(step * int32(2))), c)
        store16(x, int32(i + int32(step * int32(3))), d)
        first, i = advance(fourth, wide), int32(i + target)
    if i < groups:  # up to three are left
        j, k = int32(i + step), int32(i + int32(step * int32(2)))
        a = load_global16(first, 0)
        b = c = a
        if j < groups:
            b = load_global16(first, step)
        if k < groups:
            c = load_global16(first, int32(step * int32(2)))
        store16(x, i, a)
        if j < groups:
            store16(x, j, b)
        if k < groups:
            store16(x, k, c)


@cuda.jit(device=True)
def store_groups(x, groups, target, start):
    """Copy groups of 16 bytes from x to global memory, from group ``start`` (i64) on."""
    i, step = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    place = advance(as_u8(target), int64(int64(start + int64(i)) << int64(4)))
    wide = int64(int64(step) << int64(4))
    while i < groups:
        store_global16(place, 0, load16(x, i))
        place, i = advance(place, wide), int32(i + step)


@cuda.jit(device=True)
def load_tile(words, first, n, log, aligned, x):
    """Copy words [first, first + n), of 2**log bytes each, to x. Ends with a syncthreads."""
    whole = int32(0)
    if aligned != int32(0):
        groups = int32(int32(n << log) >> int32(4))
        load_groups(words, int64((first << int64(log)) >> int64(4)), groups, x)
        whole = int32(int32(groups << int32(4)) >> log)
    i = int32(whole + int32(cuda.threadIdx.x))
    while i < n:
        x[i] = words[int64(first + int64(i))]
        i = int32(i + int32(cuda.blockDim.x))
    cuda.syncthreads()


@cuda.jit(device=True)
def store_tile(x, n, log, aligned, words, first):
    """Inverse of `load_tile`. No syncthreads behind it."""
    whole = int32(0)
    if aligned != int32(0):
        groups = int32(int32(n << log) >> int32(4))
        store_groups(x, groups, words, int64((first << int64(log)) >> int64(4)))
        whole = int32(int32(groups << int32(4)) >> log)
    i = int32(whole + int32(cuda.threadIdx.x))
    while i < n:
        words[int64(first + int64(i))] = x[i]
        i = int32(i + int32(cuda.blockDim.x))


@cuda.jit(device=True)
def reserve(nbytes, tile, base, stride, control):
    """Byte where a segment goes: known to thread 0 alone, who does not wait for it here."""
    at = int64(base + int64(tile * stride))
    if stride == int64(0) and int32(cuda.threadIdx.x) == int32(0):
        at = int64(base + int64(atomic_add(control, 0, uint64(padded(nbytes)))))
    return at


@cuda.jit(device=True)
def store_segment(dst, nbytes, raw, tile, out, at, place):
    """Copy a segment from dst to where `reserve` said, padded with zeros; enter it.

    Has a syncthreads after it was written, and none at its end.
    """
    thread, end = int32(cuda.threadIdx.x), padded(nbytes)
    if thread < int32(end - nbytes):
        dst[int32(nbytes + thread)] = uint8(0)
    if thread == int32(0):
        place[0] = at
        directory, entry = as_u32(out), int64(tile * int64(2))
        mark = uint32(0x80000000) if raw else uint32(0)
        directory[entry] = uint32(at >> int64(4))
        directory[int64(entry + int64(1))] = uint32(uint32(nbytes) | mark)
    cuda.syncthreads()
    store_groups(dst, int32(end >> int32(4)), out, int64(int64(place[0]) >> int64(4)))


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


def encode_kernel(make_tile: MakeTile, word: int) -> Callable[..., None]:
    """The kernel that encodes a tensor of words of ``word`` bytes; see `encode_signature`.

    ``out`` starts at a multiple of 16 bytes and holds `tiles.container_bound` of them, or those of
    the directory and n_tiles * stride. ``aligned`` says whether ``words`` does, too.
    """
    measure_tile, write_tile, _ = make_tile(word, WORDS[word][1])
    as_words = WORDS[word][1]
    full = TILE_WORDS[word]
    log, shift, x_u64 = word.bit_length() - 1, full.bit_length() - 1, full * word // 8
    segment_u64 = x_u64 + SLACK // 8

    def encode(words, out, control, size, n_words, stride, aligned, a0, a1, a2, a3):
        memory = cuda.shared.array(x_u64, uint64, alignment=16)
        output = cuda.shared.array(segment_u64, uint64, alignment=16)
        scratch = cuda.shared.array(TMP_WORDS, uint32, alignment=16)
        place = cuda.shared.array(1, int64)
        x, dst, tmp = as_words(memory), as_u8(output), as_u32(scratch)
        n_tiles = int64((n_words + int64(full - 1)) >> int64(shift))
        base = int64(((n_tiles + int64(1)) >> int64(1)) << int64(4))
        tile = int64(cuda.blockIdx.x)
        while tile < n_tiles:
            first = int64(tile * int64(full))
            n = int32(min(int64(full), int64(n_words - first)))
            load_tile(words, first, n, int32(log), aligned, x)
            nbytes, state = measure_tile(x, n, dst, tmp, a0, a1, a2, a3, first)
            raw = nbytes < int32(0) or nbytes >= int32(n << int32(log))
            if raw:
                nbytes = int32(n << int32(log))
            at = reserve(nbytes, tile, base, stride, control)
            if raw:
                load_tile(words, first, n, int32(log), aligned, as_words(dst))
            else:
                write_tile(x, n, dst, tmp, state, a0, a1, a2, a3, first)
            store_segment(dst, nbytes, raw, tile, out, at, place)
            tile = int64(tile + int64(cuda.gridDim.x))
        finish(control, size, base, stride, n_tiles, as_u32(out))

    return encode


@cuda.jit(device=True)
def read_entry(directory, tile, n_tiles):
    """(start of a segment in units of 16 bytes, its length and mark), u32; 0 behind the last."""
    if tile >= n_tiles:
        return uint32(0), uint32(0)
    entry = int64(tile * int64(2))
    return uint32(directory[entry]), uint32(directory[int64(entry + int64(1))])


def decode_kernel(make_tile: MakeTile, word: int) -> Callable[..., None]:
    """The kernel that decodes a container; see `decode_signature`.

    ``payload`` starts at a multiple of 16 bytes and is padded to one. ``status[0]`` is raised to
    the index of a corrupt tile + 1; words of that tile are left as they were.
    """
    _, _, decode_tile = make_tile(word, WORDS[word][1])
    as_words = WORDS[word][1]
    full = TILE_WORDS[word]
    log, shift, x_u64 = word.bit_length() - 1, full.bit_length() - 1, full * word // 8
    segment_u64 = x_u64 + SLACK // 8

    def decode(payload, payload_bytes, words, status, n_words, aligned, a0, a1, a2, a3):
        memory = cuda.shared.array(x_u64, uint64, alignment=16)
        encoded = cuda.shared.array(segment_u64, uint64, alignment=16)
        scratch = cuda.shared.array(TMP_WORDS, uint32, alignment=16)
        x, src, tmp = as_words(memory), as_u8(encoded), as_u32(scratch)
        directory = as_u32(payload)
        n_tiles = int64((n_words + int64(full - 1)) >> int64(shift))
        lowest = uint32((n_tiles + int64(1)) >> int64(1))  # in units of 16 bytes
        tile = int64(cuda.blockIdx.x)
        place, entry = read_entry(directory, tile, n_tiles)
        while tile < n_tiles:
            # The next tile's entry comes while this one is decoded.
            next_tile = int64(tile + int64(cuda.gridDim.x))
            next_place, next_entry = read_entry(directory, next_tile, n_tiles)
            first = int64(tile * int64(full))
            n = int32(min(int64(full), int64(n_words - first)))
            raw = (entry & uint32(0x80000000)) != uint32(0)
            nbytes, whole = int32(entry & uint32(0x7FFFFFFF)), int32(n * int32(word))
            good = nbytes == whole if raw else nbytes <= whole
            end = int64(int64(int64(place) << int64(4)) + int64(nbytes))
            good = good and place >= lowest and end <= payload_bytes
            if good:
                # The payload is padded to 16 bytes, as every segment: the last 16 are all there.
                groups = int32((nbytes + int32(15)) >> int32(4))
                load_groups(payload, int64(place), groups, src)
                cuda.syncthreads()
                if raw:
                    store_tile(as_words(src), n, int32(log), aligned, words, first)
                else:
                    done = decode_tile(src, nbytes, x, n, tmp, a0, a1, a2, a3, first)
                    good = done == int32(0)
                    if good:
                        store_tile(x, n, int32(log), aligned, words, first)
            if not good and int32(cuda.threadIdx.x) == int32(0):
                atomic_max(status, 0, uint32(tile + int64(1)))
            cuda.syncthreads()
            tile, place, entry = next_tile, next_place, next_entry

    return decode
