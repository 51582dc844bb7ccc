"""Kernels launched by fewer thread blocks than usual, for as long as they are measured."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from cswap.codecs import gpu
from cswap.codecs.base import Codec, word_dtype
from cswap.codecs.launcher import SHAPES, LaunchShape
from cswap.codecs.tiled import TiledCodec
from cswap.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@contextmanager
def limited_blocks(
    codec: Codec, dtype: torch.dtype, device: torch.device, blocks: int
) -> Iterator[None]:
    """Launch this codec's encode kernel for this dtype by that many thread blocks at most.

    Raises:
        UnsupportedError: the codec has no kernels of cswap's own, or they cannot run here.
    """
    if not isinstance(codec, TiledCodec):
        raise UnsupportedError(f"codec={codec.name!r}: has no kernels whose launch can be shaped.")
    # A shape counts blocks per multiprocessor; for fewer blocks, there are fewer of those.
    launcher = gpu._launcher(device.index)  # noqa: SLF001 - no user needs less than a block each
    name = f"{codec.cuda_format}-{word_dtype(dtype).word}-encode"
    usual, shape = launcher._multiprocessors, SHAPES.get(name)  # noqa: SLF001
    SHAPES[name], launcher._multiprocessors = LaunchShape(blocks_per_sm=1), blocks  # noqa: SLF001
    try:
        yield
    finally:
        launcher._multiprocessors = usual  # noqa: SLF001
        del SHAPES[name]
        if shape is not None:
            SHAPES[name] = shape
