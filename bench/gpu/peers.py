"""Other libraries' encoders on a GPU, measured beside cswap's codecs in the same run.

cupy and torch both launch on the default stream, so CUDA events of torch time both. Some of these
functions wait for the device to learn a size; that wait is a part of their time.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.dlpack import from_dlpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Parts = tuple[Any, ...]

COLUMNS: Final = 1024
"""Of the matrix that a CSR peer takes a tensor for; its size must be a multiple."""

GROUP: Final = 128
"""Values that share a scale, as in cswap's int8 and fp8."""

WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by bytes: compaction compares bits, so -0.0 is kept."""

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Peer:
    """One library's way to encode a tensor.

    Attributes:
        name: for tables.
        package: that must be installed.
        beside: the codec of cswap that it is measured with.
        lossless: whether every bit comes back.
        dtypes: that it takes; none for all.
        encode: makes arrays of [n] elements; each array has `nbytes`.
        decode: makes [n] elements of those arrays; also takes the tensor encoded, for its dtype.
    """

    name: str
    package: str
    beside: str
    lossless: bool
    dtypes: tuple[torch.dtype, ...]
    encode: Callable[[Tensor], Parts]
    decode: Callable[[Parts, Tensor], Tensor]

    def missing(self) -> str | None:
        """Why it cannot be measured here; None if nothing is known."""
        return None if find_spec(self.package) else f"{self.package} is not installed"


def beside(names: list[str], dtype: torch.dtype) -> list[str]:
    """Names of the installed peers of these codecs for tensors of this dtype."""
    return [
        peer.name
        for peer in PEERS.values()
        if peer.beside in names and dtype in (peer.dtypes or (dtype,)) and not peer.missing()
    ]


def _csr_encode(x: Tensor) -> Parts:
    import cupy
    from cupyx.scipy import sparse

    made = sparse.csr_matrix(cupy.asarray(x.view(-1, COLUMNS)))
    return made.data, made.indices, made.indptr


def _csr_decode(parts: Parts, x: Tensor) -> Tensor:
    from cupyx.scipy import sparse

    made = sparse.csr_matrix(parts, shape=(x.numel() // COLUMNS, COLUMNS))
    return from_dlpack(made.toarray()).view(-1)


def _compact_encode(x: Tensor) -> Parts:
    import cupy

    words = cupy.asarray(x.view(WORDS[x.itemsize]))
    mask = words != 0
    return cupy.packbits(mask), words[mask]


def _compact_decode(parts: Parts, x: Tensor) -> Tensor:
    import cupy

    packed, values = parts
    mask = cupy.unpackbits(packed)[: x.numel()].astype(bool)
    places = cupy.cumsum(mask) - 1  # before the first value -1, whose value is not used
    words = cupy.where(mask, values[places], values.dtype.type(0))
    return from_dlpack(words).view(x.dtype)


def _int8_encode(x: Tensor) -> Parts:
    from torchao.quantization import quant_primitives as ao

    rows, block = x.view(-1, GROUP), (1, GROUP)
    scale, zero = ao.choose_qparams_affine(rows, ao.MappingType.SYMMETRIC, block, torch.int8)
    return ao.quantize_affine(rows, block, scale, zero, torch.int8), scale


def _int8_decode(parts: Parts, x: Tensor) -> Tensor:
    from torchao.quantization import quant_primitives as ao

    codes, scale = parts
    back: Tensor = ao.dequantize_affine(
        codes, (1, GROUP), scale, None, torch.int8, output_dtype=x.dtype
    )
    return back.view(-1)


def _fp8_encode(x: Tensor) -> Parts:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    rows, kind = x.view(-1, GROUP), torch.float8_e4m3fn
    granularity = ScalingGranularity.AXISWISE
    scale = tensor_to_scale(rows, kind, scaling_granularity=granularity, axiswise_dim=-1)
    return to_fp8_saturated(rows * scale, kind), scale


def _fp8_decode(parts: Parts, x: Tensor) -> Tensor:
    codes, scale = parts
    back: Tensor = (codes.to(torch.float32) / scale).to(x.dtype)
    return back.view(-1)


_ALL: Final = (
    Peer("cupyx csr_matrix", "cupyx", "csr", True, (torch.float32,), _csr_encode, _csr_decode),
    Peer("cupy compaction", "cupy", "zvc", True, (), _compact_encode, _compact_decode),
    Peer("torchao int8", "torchao", "int8", False, FLOATS, _int8_encode, _int8_decode),
    Peer("torchao fp8", "torchao", "fp8", False, FLOATS, _fp8_encode, _fp8_decode),
)

PEERS: Final = {peer.name: peer for peer in _ALL}
"""By name. nvCOMP's compressors are codecs of cswap: they are measured wherever it is installed."""
