"""``copies``: a tensor that is one piece many times over becomes that piece.

Masks and rotary tables that a model has repeated for every sequence and head are. Payload: i64
number of copies (little endian), then the bytes of one.
"""

from __future__ import annotations

import torch

from cswap import Codec, CorruptEncodingError
from cswap.schema.tensor import DTYPES, dtype_name

HEADER = 8  # bytes: the number of copies
MOST = 4096  # copies that one piece may stand for


class Copies(Codec):
    """One copy of a repeated tensor. Bits are compared, so NaN is equal to itself."""

    name = "copies"
    lossless = True
    max_ratio = MOST

    def supports(self, dtype, device="cpu"):
        return device == "cpu" and dtype_name(dtype) in DTYPES

    def bound(self, dtype, numel):
        return HEADER + numel * dtype.itemsize

    def encode_flat(self, x, out, *, key, stream):
        piece = raw = x.view(torch.uint8)
        for factor in (2,) * 12 + (3, 5, 7):  # piece by piece: 24 copies are 2 of 2 of 2 of 3
            pieces = piece.view(factor, -1) if len(piece) and len(piece) % factor == 0 else []
            if len(pieces) and len(raw) // pieces.shape[1] <= MOST and _all_equal(pieces):
                piece = pieces[0]
        copies = len(raw) // len(piece) if len(piece) else 1
        out[:HEADER].view(torch.int64)[0] = copies
        out[HEADER : HEADER + len(piece)] = piece
        return HEADER + len(piece)

    def decode_flat(self, payload, out, *, stream):
        raw, piece = out.view(torch.uint8), payload[HEADER:]
        copies = int(payload[:HEADER].view(torch.int64)[0]) if len(payload) >= HEADER else 0
        if not 1 <= copies <= MOST or copies * len(piece) != len(raw):
            raise CorruptEncodingError(f"copies: {copies} of {len(piece)} bytes, not {len(raw)}.")
        raw.view(copies, -1)[:] = piece


def _all_equal(pieces):
    head = pieces[:, :64]  # decides nearly always, and is cheap
    return torch.equal(head[1:], head[:-1]) and torch.equal(pieces[1:], pieces[:-1])
