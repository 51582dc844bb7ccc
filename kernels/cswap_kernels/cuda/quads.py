"""Small numbers of four words in one register: a *quad* is a u32 with a byte for each word.

The first word has the lowest byte. *Flags* are quads whose bytes are 0x80 or 0. One instruction
works on four words, where no byte overflows into the next one.
"""

from __future__ import annotations

from numba import cuda, int32, uint8, uint32, uint64

from cswap_kernels.cuda.primitives import as_u64, permuting

ONES = 0x01010101
LOW = 0x7F7F7F7F
FLAGS = 0x80808080
NIBBLES = 0x0F0F0F0F0F0F0F0F
PAIRS = 0x0303030303030303
LOW_OF_PAIRS = 0x00FF00FF
SPREAD = 0x00204081
"""A nibble times this has bit k of the nibble at bit 8 k."""

GATHER = 0x01020408
"""A quad of bits times this has bit 8 k of the quad at bit 24 + k."""

signs = permuting(0xBA98)
first_bytes, last_bytes = permuting(0x5140), permuting(0x7362)
low_halves, high_halves = permuting(0x5410), permuting(0x7632)
even_bytes, odd_bytes = permuting(0x6420), permuting(0x7531)


@cuda.jit(device=True)
def every(value):
    """The quad that has a number (0 to 255) four times."""
    return uint32(uint32(value) * uint32(ONES))


@cuda.jit(device=True)
def above(quad, limit):
    """Flags of the bytes above a number (0 to 126); limit: `every` of 127 minus that number."""
    return uint32(uint32(uint32(uint32(quad & uint32(LOW)) + limit) | quad) & uint32(FLAGS))


@cuda.jit(device=True)
def is_255(quad, flags):
    """Those of some flags whose byte of the quad is 255."""
    return uint32(uint32(uint32(uint32(quad & uint32(LOW)) + uint32(ONES)) & quad) & flags)


@cuda.jit(device=True)
def full(flags):
    """A byte of ones for each flag; other bits of the bytes do not matter."""
    return signs(flags, flags)


@cuda.jit(device=True)
def count_flags(flags, counts):
    """A quad of counts, each one more where there is a flag. Up to 255 calls."""
    return uint32(counts + uint32(flags >> uint32(7)))


@cuda.jit(device=True)
def sum_of(counts):
    """The sum of a quad's bytes."""
    pairs = uint32(
        uint32(counts & uint32(LOW_OF_PAIRS))
        + uint32(uint32(counts >> uint32(8)) & uint32(LOW_OF_PAIRS))
    )
    return int32(uint32(uint32(pairs >> uint32(16)) + pairs) & uint32(0xFFFF))


@cuda.jit(device=True)
def gathered(low, high):
    """The u32 of eight bits, of which bit k is the lowest bit of byte k of two quads of 0 and 1."""
    both = uint32(low | uint32(high << uint32(4)))
    return uint32(uint32(both * uint32(GATHER)) >> uint32(24))


@cuda.jit(device=True)
def gathered_flags(low, high):
    """`gathered` of flags."""
    both = uint32(uint32(low >> uint32(7)) + uint32(high >> uint32(3)))
    return uint32(uint32(both * uint32(GATHER)) >> uint32(24))


@cuda.jit(device=True)
def pair(low, high):
    """The u64 of two quads: eight bytes."""
    return uint64(uint64(low) | uint64(uint64(high) << uint64(32)))


@cuda.jit(device=True)
def halves(eight):
    """The two quads of a u64."""
    return uint32(eight & uint64(0xFFFFFFFF)), uint32(eight >> uint64(32))


@cuda.jit(device=True)
def transposed(a, b, c, d):
    """Quad k has byte k of each of four u32; its own inverse."""
    low_ab, low_cd = first_bytes(a, b), first_bytes(c, d)
    high_ab, high_cd = last_bytes(a, b), last_bytes(c, d)
    return (
        low_halves(low_ab, low_cd),
        high_halves(low_ab, low_cd),
        low_halves(high_ab, high_cd),
        high_halves(high_ab, high_cd),
    )


@cuda.jit(device=True)
def lowest_bits(eight):
    """The byte whose bit k is the lowest of byte k of a u64."""
    low, high = halves(eight)
    return uint8(gathered(uint32(low & uint32(ONES)), uint32(high & uint32(ONES))))


@cuda.jit(device=True)
def put_fields(dst, at, bits, quarter, i, a, b, c, d):
    """Pack fields of ``bits`` (0 to 7) bits as planes.py spreads them; see docs/format/bitpack.md.

    They begin at byte ``at``, a multiple of 16. ``quarter`` is a quarter of the words, rounded up
    to 64, in units of eight. a, b, c, d are u64: fields of eight words, the i-th of each quarter.
    """
    eights, step = as_u64(dst), int32(int32(at >> int32(3)) + i)
    if bits & int32(4):
        low = uint64(NIBBLES)
        eights[step] = uint64(uint64(a & low) | uint64(uint64(c & low) << uint64(4)))
        step = int32(step + quarter)
        eights[step] = uint64(uint64(b & low) | uint64(uint64(d & low) << uint64(4)))
        step = int32(step + quarter)
        a, b = uint64(a >> uint64(4)), uint64(b >> uint64(4))
        c, d = uint64(c >> uint64(4)), uint64(d >> uint64(4))
    if bits & int32(2):
        low = uint64(PAIRS)
        ab = uint64(uint64(a & low) | uint64(uint64(b & low) << uint64(2)))
        cd = uint64(uint64(c & low) | uint64(uint64(d & low) << uint64(2)))
        eights[step] = uint64(ab | uint64(cd << uint64(4)))
        step = int32(step + quarter)
        a, b = uint64(a >> uint64(2)), uint64(b >> uint64(2))
        c, d = uint64(c >> uint64(2)), uint64(d >> uint64(2))
    if bits & int32(1):
        place = int32(int32(int32(step - i) << int32(3)) + i)
        dst[place] = lowest_bits(a)
        dst[int32(place + quarter)] = lowest_bits(b)
        dst[int32(place + int32(quarter << int32(1)))] = lowest_bits(c)
        dst[int32(place + int32(quarter * int32(3)))] = lowest_bits(d)
        if i == int32(0) and (quarter & int32(2)):  # an eighth of the words is no multiple of 16
            eights[int32(step + int32(quarter >> int32(1)))] = uint64(0)


@cuda.jit(device=True)
def get_fields(src, at, bits, quarter, i):
    """Inverse of `put_fields`: four u64."""
    eights, step = as_u64(src), int32(int32(at >> int32(3)) + i)
    a = b = c = d = uint64(0)
    up = uint64(0)
    if bits & int32(4):
        ac, bd = uint64(eights[step]), uint64(eights[int32(step + quarter)])
        low = uint64(NIBBLES)
        a, c = uint64(ac & low), uint64(uint64(ac >> uint64(4)) & low)
        b, d = uint64(bd & low), uint64(uint64(bd >> uint64(4)) & low)
        step, up = int32(step + int32(quarter << int32(1))), uint64(4)
    if bits & int32(2):
        four, low = uint64(eights[step]), uint64(PAIRS)
        a = uint64(a | uint64(uint64(four & low) << up))
        b = uint64(b | uint64(uint64(uint64(four >> uint64(2)) & low) << up))
        c = uint64(c | uint64(uint64(uint64(four >> uint64(4)) & low) << up))
        d = uint64(d | uint64(uint64(uint64(four >> uint64(6)) & low) << up))
        step, up = int32(step + quarter), uint64(up + uint64(2))
    if bits & int32(1):
        place = int32(int32(int32(step - i) << int32(3)) + i)
        a = uint64(a | uint64(spread(src[place]) << up))
        b = uint64(b | uint64(spread(src[int32(place + quarter)]) << up))
        c = uint64(c | uint64(spread(src[int32(place + int32(quarter << int32(1)))]) << up))
        d = uint64(d | uint64(spread(src[int32(place + int32(quarter * int32(3)))]) << up))
    return a, b, c, d


@cuda.jit(device=True)
def spread(byte):
    """The u64 whose byte k is bit k of a byte."""
    low = uint32(uint32(uint32(byte) & uint32(15)) * uint32(SPREAD))
    high = uint32(uint32(uint32(byte) >> uint32(4)) * uint32(SPREAD))
    return pair(uint32(low & uint32(ONES)), uint32(high & uint32(ONES)))
