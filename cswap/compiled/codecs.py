"""Codecs of fixed size in torch's own operators, so that a compiler can fuse them.

An encoding is a tuple: the codec's name, the dtype, then tensors. A tensor's last dimension is cut
into groups of GROUP where it can be; otherwise a group is a whole row.

Note [zeros stay zeros]
~~~~~~~~~~~~~~~~~~~~~~~
The backward of relu lets a gradient through where the saved result is above zero. So int8 gives a
value other than zero a code other than zero's, as the kernels of ``int8`` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Encode = Callable[[Tensor], tuple[Tensor, ...]]
    Decode = Callable[..., Tensor]

GROUP: Final = 128
"""Values that share a scale, as in the format ``int8``."""

CODES: Final = 255
"""Steps of a group's range."""

SMALLEST: Final = CODES * torch.finfo(torch.float32).tiny
"""Range of a group, below which the inverse of a step would be infinite."""

BITS: Final = 8
"""Booleans in a byte."""


def _grouped(x: Tensor) -> Tensor:
    # [..., n] to [..., groups, values]
    return _cut(x, GROUP) if _divides(x, GROUP) else x.unsqueeze(-2)


def _divides(x: Tensor, size: int) -> bool:
    # Whether rows are cut evenly; False for a row whose length is a symbol while torch traces.
    n: Any = x.shape[-1]
    return isinstance(n, int) and n % size == 0


def _cut(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def encode_int8(x: Tensor) -> tuple[Tensor, ...]:
    """Codes [..., groups, values] uint8, scales [..., groups, 1] float32, zeros' codes uint8.

    A group's range is that of its values and of zero; the error is at most half a step of it, and
    a whole one at values next to zero and at the far end of a group that lies almost on one side
    of zero. Of a group whose range is below `SMALLEST`, only signs come back. A group with an
    infinity or a NaN, or with float64 values that float32 cannot hold, comes back as NaN.
    """
    y = _grouped(x).float()
    low, high = y.amin(-1, keepdim=True).clamp(max=0), y.amax(-1, keepdim=True).clamp(min=0)
    scale = high / CODES - low / CODES  # the range itself may be infinite
    inverse = torch.where(scale < SMALLEST / CODES, 0.0, 1 / scale)
    # A code is left on each side of zero that has values.
    zero = (-low * inverse).round().clamp((low < 0).float(), CODES - (high > 0).float())
    code = (y * inverse).round() + zero
    code = torch.where((y != 0) & (code == zero), zero + y.sign(), code).clamp(0, CODES)
    return code.to(torch.uint8), scale, zero.to(torch.uint8)


def decode_int8(code: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The inverse of `encode_int8`, float32."""
    return ((code.float() - zero.float()) * scale).flatten(-2)


def encode_bf16(x: Tensor) -> tuple[Tensor, ...]:
    """The values, rounded."""
    return (x.to(torch.bfloat16),)


def decode_bf16(x: Tensor) -> Tensor:
    """The rounded values."""
    return x


def encode_mask(x: Tensor) -> tuple[Tensor, ...]:
    """Bytes [..., n / 8] of eight booleans each, the first in the lowest bit; n divides by 8."""
    bits = _cut(x, BITS).to(torch.uint8)
    return ((bits << _positions(x)).sum(-1, dtype=torch.uint8),)


def decode_mask(packed: Tensor) -> Tensor:
    """The inverse of `encode_mask`: booleans."""
    return (((packed.unsqueeze(-1) >> _positions(packed)) & 1) != 0).flatten(-2)


def _positions(x: Tensor) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=x.device)


CODECS: Final[dict[str, tuple[Encode, Decode]]] = {
    "int8": (encode_int8, decode_int8),
    "bf16": (encode_bf16, decode_bf16),
    "mask": (encode_mask, decode_mask),
}
"""Encoders and decoders by name."""

WIDE: Final = (torch.float32, torch.float64)
FLOATS: Final = (*WIDE, torch.float16, torch.bfloat16)


def codec_for(x: Tensor, lossy: str) -> str | None:
    """Name of the codec for a tensor, of one of CODECS; None: none makes it smaller.

    Args:
        x: the tensor; its values are not looked at.
        lossy: "off", "bf16" or "int8".
    """
    if not x.dim():
        return None
    if x.dtype == torch.bool:
        return "mask" if _divides(x, BITS) else None
    if lossy == "int8" and x.dtype in FLOATS:
        return lossy
    return lossy if lossy == "bf16" and x.dtype in WIDE else None


def encode(x: Tensor, codec: str) -> tuple[Any, ...]:
    """The codec's name, the tensor's dtype, and the encoding's tensors."""
    return (codec, x.dtype, *CODECS[codec][0](x))


def decode(codec: str, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
    """The inverse of `encode`."""
    return CODECS[codec][1](*tensors).to(dtype)
