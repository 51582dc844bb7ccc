"""How large an error a saved tensor forgives, and how large a one a codec makes.

Note [three tolerances]
~~~~~~~~~~~~~~~~~~~~~~~
Backward divides the input of a norm by the deviation of its values, after it has taken off their
mean. So an error in it grows where the mean is large. A float16 keeps 11 bits of each value. That
is a thirtieth of the error of int8, and three bits more than bfloat16 keeps, in which norms are
trained. So such a tensor is stored in no fewer bits where the user allows a lossy codec. The same
holds for the output of a norm, because it is computed again from the input.

A tensor is never computed again from inputs that forgive more than it does, and never shares their
encoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cswap.codecs.base import Codec

EXACT: Final = 0
"""Of tensors whose every bit must come back, and of lossless codecs."""

FINE: Final = 1
"""Of the inputs and outputs of norms, and of codecs whose relative error is at most `FINE_ERROR`.
"""

COARSE: Final = 2
"""Of all other tensors of floating point numbers, and of all other lossy codecs."""

FINE_ERROR: Final = 0.0005
"""Largest relative error (`CodecTraits.relative_error`) of a codec for `FINE` tensors."""


def needed_tolerance(codec: Codec) -> int:
    """The least tolerance of a tensor that this codec may encode.

    Where every Python call counts, the caller asks `Codec.lossless` first.
    """
    if codec.lossless:
        return EXACT
    error = codec.traits.relative_error
    return COARSE if error is None or error > FINE_ERROR else FINE
