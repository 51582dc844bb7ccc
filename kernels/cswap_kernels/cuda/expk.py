"""``expk`` on CUDA: the format of cswap_kernels/expk.py, a thread per four times eight words.

The words of a tile are seen in quarters, as the parts of docs/format/bitpack.md lay out fields of
a few bits: a thread takes the i-th eight words of each quarter, and writes whole bytes. Words
behind the tile's last one are made such that all their bits in the encoding are zero.

    1. the largest exponent;  2. how many words each choice of k and zero code would escape;
    3. rows and codes, and a bit in tmp for every word that escapes;  4. those words, in order.

expk_measure.py has steps 1 and 2, expk_write.py the others, expk_decode.py their inverse. Each is
made for a layout of a float's bits (expk_layout.py), which tells how words are taken apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from numba import cuda, int32

from cswap_kernels.cuda.expk_bfloat16 import BFLOAT16
from cswap_kernels.cuda.expk_decode import decoder
from cswap_kernels.cuda.expk_float16 import FLOAT16
from cswap_kernels.cuda.expk_float32 import FLOAT32
from cswap_kernels.cuda.expk_measure import measurer
from cswap_kernels.cuda.expk_write import writer
from cswap_kernels.cuda.warps import WORD_TYPES

if TYPE_CHECKING:
    from cswap_kernels.cuda.container import TileFunctions
    from cswap_kernels.cuda.expk_layout import Layout

LAYOUTS: Final[dict[int, tuple[Layout, ...]]] = {2: (BFLOAT16, FLOAT16), 4: (FLOAT32,)}
"""Layouts of words of so many bytes."""


def _tile(layout: Layout, narrow: Any) -> TileFunctions:
    # (measure, write, decode) for one layout of words of the type ``narrow``.
    return measurer(layout, narrow), writer(layout, narrow), decoder(layout, narrow)


def _either(first: Layout, second: Layout, narrow: Any) -> TileFunctions:
    # The functions of the layout whose mantissa has a1 bits.
    measure_first, write_first, decode_first = _tile(first, narrow)
    measure_second, write_second, decode_second = _tile(second, narrow)
    bits = first.mantissa_bits

    @cuda.jit(device=True)
    def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
        if int32(a1) == int32(bits):
            return measure_first(x, n, dst, tmp, a0, a1, a2, a3, first)
        return measure_second(x, n, dst, tmp, a0, a1, a2, a3, first)

    @cuda.jit(device=True)
    def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
        if int32(a1) == int32(bits):
            write_first(x, n, dst, tmp, state, a0, a1, a2, a3, first)
        else:
            write_second(x, n, dst, tmp, state, a0, a1, a2, a3, first)

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        if int32(a1) == int32(bits):
            return decode_first(src, nbytes, x, n, tmp, a0, a1, a2, a3, first)
        return decode_second(src, nbytes, x, n, tmp, a0, a1, a2, a3, first)

    return measure, write, decode


def expk_tile(word: int, as_words: Any) -> TileFunctions:
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py.

    a0..a2: exponent bits, mantissa bits, k or 0 for the cheaper.
    """
    layouts, narrow = LAYOUTS[word], WORD_TYPES[word]
    if len(layouts) == 1:
        return _tile(layouts[0], narrow)
    return _either(layouts[0], layouts[1], narrow)
