"""``zfp`` on CUDA: the payload of docs/format/zfp.md, bit for bit as the CPU's.

Not a tile container: blocks have a fixed number of bits, so every block's place is known. A thread
takes one block, a warp 32 at a time: whole words of memory, 32 blocks of B bits being B words of 32
bits (or B/2 of 64). They are put together in shared memory, a piece per warp; warps meet only at
the start and at the end.

Note [a tensor stored raw]
~~~~~~~~~~~~~~~~~~~~~~~~~~
One value that zfp cannot take makes the whole tensor raw. It may be the last one to be looked at:
then the encoder's last block copies the tensor over these bytes, alone. That is slow for
a kernel, about as fast as a link to the host, and saves the others a second launch. Where the
stream would not be shorter, which is known beforehand, all blocks copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from numba import cuda, int32, int64, uint32, uint64

from cswap_kernels.cuda.container import WORDS, decode_signature, encode_signature
from cswap_kernels.cuda.primitives import (
    FULL,
    advance,
    as_u32,
    atomic_add,
    atomic_max,
    atomic_or,
    load_global16,
    store_global16,
)
from cswap_kernels.cuda.warps import lane_id, n_warps, warp_id
from cswap_kernels.cuda.zfp_blocks import (
    DECODE_TABLE,
    ENCODE_TABLE,
    block_decoder,
    block_encoder,
    fill_decode_table,
    fill_encode_table,
    magnitude_bits,
)
from cswap_kernels.cuda.zfp_values import block_loader, block_storer
from cswap_kernels.cuda.zfp_words import funnels, word_of
from cswap_kernels.zfp import LARGEST

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_WARPS: Final = 8
"""Per block of threads. More find no memory to put their blocks together, and nothing to do."""

PIECE: Final = 132
"""Words of shared memory per warp. A code has up to 4 words less 4 bits, or the tensor is raw; a
decoder reads up to 4 words from the one in which the last code starts."""

_ALL_PIECES: Final = MAX_WARPS * PIECE

HEADER_BYTES: Final = 16
_RAW: Final = 1


@cuda.jit(device=True)
def stream_bytes(n_words, bits):
    """See cswap_kernels/zfp.py."""
    n_blocks = int64(int64(n_words + int64(3)) >> int64(2))
    return int64(int64(int64(int64(n_blocks * int64(bits)) + int64(63)) >> int64(6)) << int64(3))


@cuda.jit(device=True)
def first_chunk():
    """Of 32 blocks: the first that this warp takes."""
    return int64(
        int64(int64(cuda.blockIdx.x) * int64(min(n_warps(), int32(MAX_WARPS)))) + warp_id()
    )


@cuda.jit(device=True)
def chunk_step():
    """From one of the chunks that a warp takes to the next."""
    return int64(int64(cuda.gridDim.x) * int64(min(n_warps(), int32(MAX_WARPS))))


@cuda.jit(device=True)
def copy_words(source, target, n_words, log, aligned, first, step):
    """Copy words of 2**log bytes; this is thread ``first`` of ``step``."""
    i, whole = first, int64(0)
    if aligned != int32(0):
        groups = int64(int64(n_words << int64(log)) >> int64(4))
        while i < groups:
            store_global16(target, i, load_global16(source, i))
            i = int64(i + step)
        whole = int64(int64(groups << int64(4)) >> int64(log))
    i = int64(whole + first)
    while i < n_words:
        target[i] = source[i]
        i = int64(i + step)


@cuda.jit(device=True)
def chunk_limit(chunk, n_chunks, chunk_words, n_stream_words):
    """Words of the stream that belong to a chunk: the last one has the rest."""
    if chunk == int64(n_chunks - int64(1)):
        return int32(n_stream_words - int64(chunk * int64(chunk_words)))
    return chunk_words


def code_functions(width: int) -> tuple[Any, Any, Any]:
    """(masks, put, get): the code of a lane's block into and out of a warp's shared memory.

    masks(bits) are of the 4 words of a code of so many bits. put(piece, bits, masks, a, b, c, d)
    joins the codes, cut off; the piece is zero unless they are whole words.
    get(piece, bits, masks) -> a, b, c, d.
    """
    u, log, ones = word_of(width), width.bit_length() - 1, (1 << width) - 1
    left, right = funnels(width)

    @cuda.jit(device=True)
    def lowest(bits):
        if bits >= int32(width):
            return u(ones)
        if bits <= int32(0):
            return u(0)
        return u(u(u(1) << u(bits)) - u(1))

    @cuda.jit(device=True)
    def masks(bits):
        return (
            lowest(bits),
            lowest(int32(bits - int32(width))),
            lowest(int32(bits - int32(2 * width))),
            lowest(int32(bits - int32(3 * width))),
        )

    @cuda.jit(device=True)
    def join(piece, at, word):
        if word != u(0):
            atomic_or(piece, at, word)

    @cuda.jit(device=True)
    def put(piece, bits, masks, a, b, c, d):
        a, b, c, d = u(a & masks[0]), u(b & masks[1]), u(c & masks[2]), u(d & masks[3])
        start = int32(lane_id() * bits)
        at, by = int32(start >> int32(log)), u(start & int32(width - 1))
        if int32(bits & int32(width - 1)) == int32(0):
            piece[at] = a
            if bits > int32(width):
                piece[int32(at + int32(1))] = b
            if bits > int32(2 * width):
                piece[int32(at + int32(2))] = c
            return
        join(piece, at, u(a << by))
        join(piece, int32(at + int32(1)), left(a, b, by))
        join(piece, int32(at + int32(2)), left(b, c, by))
        join(piece, int32(at + int32(3)), left(c, d, by))
        join(piece, int32(at + int32(4)), left(d, u(0), by))

    @cuda.jit(device=True)
    def get(piece, bits, masks):
        start = int32(lane_id() * bits)
        at, by = int32(start >> int32(log)), u(start & int32(width - 1))
        a, b = u(piece[at]), u(piece[int32(at + int32(1))])
        c, d = u(piece[int32(at + int32(2))]), u(piece[int32(at + int32(3))])
        e = u(piece[int32(at + int32(4))])
        a, b, c, d = right(a, b, by), right(b, c, by), right(c, d, by), right(d, e, by)
        return u(a & masks[0]), u(b & masks[1]), u(c & masks[2]), u(d & masks[3])

    return masks, put, get


def stream_encoder(word: int) -> Any:
    """The device function that encodes all of a warp's chunks; 1 if a value is too large, or 0."""
    width = max(32, 8 * word)
    u, log = word_of(width), width.bit_length() - 1
    magnitude, largest = (1 << (width - 1)) - 1, magnitude_bits(LARGEST, width)
    load, encode_block = block_loader(word), block_encoder(width)
    make_masks, put, _ = code_functions(width)

    @cuda.jit(device=True)
    def encode_stream(words, stream, n_words, bits, kind, aligned, piece, table):
        lane, too_large, masks = lane_id(), int32(0), make_masks(bits)
        n_blocks = int64(int64(n_words + int64(3)) >> int64(2))
        n_chunks = int64(int64(n_blocks + int64(31)) >> int64(5))
        chunk_words = int32(int32(bits << int32(5)) >> int32(log))
        n_stream_words = int64(int64(stream_bytes(n_words, bits) << int64(3)) >> int64(log))
        chunk = first_chunk()
        while chunk < n_chunks:
            if int32(bits & int32(width - 1)) != int32(0):
                i = lane
                while i <= chunk_words:
                    piece[i] = u(0)
                    i = int32(i + int32(32))
                cuda.syncwarp(FULL)
            block = int64(int64(chunk << int64(5)) + int64(lane))
            a, b, c, d = u(0), u(0), u(0), u(0)
            if block < n_blocks:
                v0, v1, v2, v3 = load(words, block, n_words, aligned, kind)
                top = u(max(u(v0 & u(magnitude)), u(v1 & u(magnitude))))
                top = u(max(top, u(v2 & u(magnitude))))
                top = u(max(top, u(v3 & u(magnitude))))
                if top >= u(largest):
                    too_large = int32(1)
                else:
                    a, b, c, d = encode_block(v0, v1, v2, v3, top, table)
            put(piece, bits, masks, a, b, c, d)
            cuda.syncwarp(FULL)
            start = int64(chunk * int64(chunk_words))
            limit = chunk_limit(chunk, n_chunks, chunk_words, n_stream_words)
            i = lane
            while i < limit:
                stream[int64(start + int64(i))] = piece[i]
                i = int32(i + int32(32))
            cuda.syncwarp(FULL)
            chunk = int64(chunk + chunk_step())
        return too_large

    return encode_stream


@cuda.jit(device=True)
def write_header(out, n_words, bits, raw):
    """16 bytes; one thread calls it."""
    mode = uint32(_RAW) if raw else uint32(0)
    low, high = uint32(n_words & int64(FULL)), uint32(n_words >> int64(32))
    store_global16(out, int64(0), (mode, uint32(bits), low, high))


@cuda.jit(device=True)
def leave(control, too_large, last):
    """Whether this block of threads is the last to come here, and whether any is too large.

    Everything that other blocks wrote before is then in memory. Control is zero again.
    """
    cuda.threadfence()
    here = cuda.syncthreads_or(too_large)
    if int32(cuda.threadIdx.x) == int32(0):
        if here:
            atomic_max(control, 0, uint64(1))
        cuda.threadfence()
        done = uint64(atomic_add(control, 1, uint64(1)))
        last[0], last[1] = int32(0), int32(0)
        if done == uint64(uint64(cuda.gridDim.x) - uint64(1)):
            last[0] = int32(1)
            if uint64(atomic_add(control, 0, uint64(0))) != uint64(0):
                last[1] = int32(1)
            control[0], control[1] = uint64(0), uint64(0)
    cuda.syncthreads()
    cuda.threadfence()
    return last[0] != int32(0), last[1] != int32(0)


def zfp_encode_kernel(word: int) -> Callable[..., None]:
    """The kernel that makes a payload of words of ``word`` bytes.

    Arguments as `container.encode_signature` says. ``out`` starts at a multiple of 16 bytes and
    holds 16 more than the words. a0: bits per block; a1: IEEE or BFLOAT16, for words of 2 bytes.
    """
    width, log = max(32, 8 * word), word.bit_length() - 1
    as_code, as_words = WORDS[width // 8][1], WORDS[word][1]
    code_type = word_of(width)
    encode_stream = stream_encoder(word)

    def encode(words, out, control, size, n_words, stride, aligned, a0, a1, a2, a3):
        memory = cuda.shared.array(_ALL_PIECES, code_type, alignment=16)
        table = cuda.shared.array(ENCODE_TABLE, uint32, alignment=16)
        last = cuda.shared.array(2, int32)
        thread, bits = int32(cuda.threadIdx.x), int32(a0)
        data = advance(out, HEADER_BYTES)
        nbytes = stream_bytes(n_words, bits)
        raw = nbytes >= int64(n_words << int64(log))
        too_large = int32(0)
        if raw:
            step = int64(int64(cuda.gridDim.x) * int64(cuda.blockDim.x))
            first = int64(int64(int64(cuda.blockIdx.x) * int64(cuda.blockDim.x)) + int64(thread))
            copy_words(words, as_words(data), n_words, int32(log), aligned, first, step)
        else:
            fill_encode_table(as_u32(table))
            cuda.syncthreads()
            if warp_id() < int32(MAX_WARPS):
                piece = advance(as_code(memory), int32(warp_id() * int32(PIECE)))
                too_large = encode_stream(
                    words, as_code(data), n_words, bits, int32(a1), aligned, piece, as_u32(table)
                )
        is_last, found_large = leave(control, too_large, last)
        if is_last:
            if found_large:
                raw = True
                step = int64(cuda.blockDim.x)
                copy_words(words, as_words(data), n_words, int32(log), aligned, int64(thread), step)
            if thread == int32(0):
                write_header(out, n_words, bits, raw)
                if raw:
                    nbytes = int64(n_words << int64(log))
                size[0] = uint64(int64(nbytes + int64(HEADER_BYTES)))

    return encode


def stream_decoder(word: int) -> Any:
    """The device function that decodes all of a warp's chunks."""
    width = max(32, 8 * word)
    log = width.bit_length() - 1
    store, decode_block = block_storer(word), block_decoder(width)
    make_masks, _, get = code_functions(width)

    @cuda.jit(device=True)
    def decode_stream(stream, words, n_words, bits, kind, aligned, piece, table):
        lane, masks = lane_id(), make_masks(bits)
        n_blocks = int64(int64(n_words + int64(3)) >> int64(2))
        n_chunks = int64(int64(n_blocks + int64(31)) >> int64(5))
        chunk_words = int32(int32(bits << int32(5)) >> int32(log))
        n_stream_words = int64(int64(stream_bytes(n_words, bits) << int64(3)) >> int64(log))
        chunk = first_chunk()
        while chunk < n_chunks:
            start = int64(chunk * int64(chunk_words))
            limit = chunk_limit(chunk, n_chunks, chunk_words, n_stream_words)
            i = lane
            while i < limit:
                piece[i] = stream[int64(start + int64(i))]
                i = int32(i + int32(32))
            cuda.syncwarp(FULL)
            block = int64(int64(chunk << int64(5)) + int64(lane))
            if block < n_blocks:
                a, b, c, d = get(piece, bits, masks)
                a, b, c, d = decode_block(a, b, c, d, bits, table)
                store(words, block, n_words, aligned, kind, a, b, c, d)
            cuda.syncwarp(FULL)
            chunk = int64(chunk + chunk_step())

    return decode_stream


def zfp_decode_kernel(word: int) -> Callable[..., None]:
    """The kernel that decodes a payload; arguments as `container.decode_signature` says.

    Raises ``status[0]`` to 1, and leaves the words as they are, when the header or the size is not
    that of so many words at so many bits. Any stream of the right size is one.
    """
    width, log = max(32, 8 * word), word.bit_length() - 1
    as_code, as_words = WORDS[width // 8][1], WORDS[word][1]
    code_type = word_of(width)
    decode_stream = stream_decoder(word)

    def decode(payload, payload_bytes, words, status, n_words, aligned, a0, a1, a2, a3):
        memory = cuda.shared.array(_ALL_PIECES, code_type, alignment=16)
        table = cuda.shared.array(DECODE_TABLE, uint32, alignment=16)
        thread, bits = int32(cuda.threadIdx.x), int32(a0)
        data = advance(payload, HEADER_BYTES)
        nbytes, raw_bytes = stream_bytes(n_words, bits), int64(n_words << int64(log))
        mode, found = uint32(2), int64(payload_bytes - int64(HEADER_BYTES))
        if found >= int64(0):
            mode, found_bits, low, high = load_global16(payload, int64(0))
            n_found = uint64(uint64(low) | uint64(uint64(high) << uint64(32)))
            if found_bits != uint32(bits) or n_found != uint64(n_words):
                mode = uint32(2)
        # Only a stream shorter than raw fits the shared memory.
        if mode == uint32(0) and found == nbytes and nbytes < raw_bytes:
            fill_decode_table(as_u32(table))
            cuda.syncthreads()
            if warp_id() < int32(MAX_WARPS):
                piece = advance(as_code(memory), int32(warp_id() * int32(PIECE)))
                decode_stream(as_code(data), words, n_words, bits, int32(a1), aligned, piece, table)
        elif mode == uint32(_RAW) and found == raw_bytes:
            step = int64(int64(cuda.gridDim.x) * int64(cuda.blockDim.x))
            first = int64(int64(int64(cuda.blockIdx.x) * int64(cuda.blockDim.x)) + int64(thread))
            copy_words(as_words(data), words, n_words, int32(log), aligned, first, step)
        elif thread == int32(0):
            atomic_max(status, 0, uint32(1))

    return decode


def zfp_kernel(word: int, direction: str) -> tuple[Callable[..., None], Any]:
    """(kernel, signature): "encode" or "decode" of words of ``word`` bytes."""
    if direction == "encode":
        return zfp_encode_kernel(word), encode_signature(word)
    return zfp_decode_kernel(word), decode_signature(word)
