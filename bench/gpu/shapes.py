"""Launch shapes other than the default, for as long as they are measured."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from cswap.codecs import gpu
from cswap.codecs.base import Codec, word_dtype
from cswap.codecs.launcher import SHAPES, LaunchShape
from cswap.codecs.tiled import TiledCodec
from cswap.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

SWEPT: Final = tuple(
    LaunchShape(threads, blocks_per_sm)
    for threads, blocks_per_sm in ((128, 4), (128, 8), (128, 16), (256, 2), (256, 8), (512, 2))
)


@contextmanager
def launch_shape(codec: Codec, dtype: torch.dtype, shape: LaunchShape) -> Iterator[None]:
    """Launch this codec's kernels for this dtype in that shape.

    Raises:
        UnsupportedError: the codec has no kernels of cswap's own.
    """
    if not isinstance(codec, TiledCodec):
        raise UnsupportedError(f"codec={codec.name!r}: has no kernels whose launch can be shaped.")
    word = word_dtype(dtype).word
    names = [f"{codec.cuda_format}-{word}-{direction}" for direction in ("encode", "decode")]
    before = {name: SHAPES[name] for name in names if name in SHAPES}
    SHAPES.update(dict.fromkeys(names, shape))
    try:
        yield
    finally:
        for name in names:
            del SHAPES[name]
        SHAPES.update(before)


@contextmanager
def limited_blocks(
    codec: Codec, dtype: torch.dtype, device: torch.device, blocks: int
) -> Iterator[None]:
    """Launch this codec's kernels for this dtype by that many thread blocks at most.

    Raises:
        UnsupportedError: see `launch_shape`; or kernels cannot run on this device.
    """
    # A shape counts blocks per multiprocessor; for fewer blocks, there are fewer of those.
    launcher = gpu._launcher(device.index)  # noqa: SLF001 - no user needs less than a block each
    before = launcher._multiprocessors  # noqa: SLF001
    with launch_shape(codec, dtype, LaunchShape(blocks_per_sm=1)):
        launcher._multiprocessors = blocks  # noqa: SLF001
        try:
            yield
        finally:
            launcher._multiprocessors = before  # noqa: SLF001
