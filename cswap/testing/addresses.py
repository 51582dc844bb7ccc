"""Compares a codec's way by address with its way of flat tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cswap.codecs.layout import flatten
from cswap.testing.buffers import Guarded, bits, fail_unless

if TYPE_CHECKING:
    from cswap.codecs.base import Codec, Stream


def check_by_address(codec: Codec, x: torch.Tensor, stream: Stream, what: str) -> None:
    """Check `Codec.by_address` on one tensor, if the codec has such a way for it.

    Args:
        codec: under test.
        x: the tensor, on a CPU.
        stream: number of threads.
        what: the tensor, in words.

    Raises:
        AssertionError: the bytes differ from those of `Codec.encode`, or memory behind the bound or
            behind the tensor was written.
    """
    flat = flatten(x)
    way = codec.by_address(flat.dtype, flat.nbytes, stream.threads) if flat.nbytes else None
    if way is None:
        return
    wanted = codec.encode(flat, stream=stream)
    payload, back = Guarded(way.bound, 0xA5), Guarded(flat.nbytes, 0x5A)
    nbytes = way.encode(flat.data_ptr(), payload.inside.data_ptr())
    fail_unless(payload.intact, f"{what}: encode by address wrote outside its bound")
    same = torch.equal(payload.inside[:nbytes], wanted.payload)
    fail_unless(same, f"{what}: encode by address gave other bytes")
    way.decode(payload.inside.data_ptr(), nbytes, back.inside.data_ptr())
    fail_unless(back.intact, f"{what}: decode by address wrote outside its output")
    same = torch.equal(back.inside, bits(codec.decode(wanted, stream=stream)))
    fail_unless(same, f"{what}: decode by address gave other values")
