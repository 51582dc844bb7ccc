"""Compiles the CPU's kernels beforehand: the first use of a codec would wait for it.

Numba keeps the machine code on the disk, so this is done once per machine, or while the image of
a container is built.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from typing import TYPE_CHECKING, Final

import torch

from cswap.advisor.candidates import lossless_candidates
from cswap.codecs.base import takes
from cswap.codecs.first_use import note_compiled, unmarked
from cswap.codecs.parallel import MIN_RANGE_TILES
from cswap.codecs.registry import get_codec, list_codecs
from cswap.codecs.tiled import TiledCodec, tile_numel
from cswap.codecs.warmup import warm
from cswap.devices.cpu import CpuStream
from cswap.errors import ConfigError, CswapError
from cswap.log import log
from cswap.profiler import profile
from cswap.schema.tensor import dtype_name
from cswap_kernels.jit import UNCACHED, numba_folder, told_of_compiling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cswap.codecs.base import Codec

PROFILER: Final = "profiler"
CPU: Final = torch.device("cpu")
IDLE: Final = 19
"""Niceness of a process beside a training."""


DTYPES: Final = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
"""Of the tensors that training saves; others share their kernels, or compile at their first use."""

NOT_KEPT: Final = f"Compiled for this process alone. {UNCACHED}"
"""Said where no folder can be written."""


def folder() -> str:
    """Where compiled kernels are kept; empty: nowhere."""
    return str(numba_folder() or "")


def dtypes_of(names: Sequence[str]) -> list[torch.dtype]:
    """Return the dtypes with these names, such as ``float32``.

    Raises:
        ConfigError: a name is none of `DTYPES`.
    """
    known = {dtype_name(dtype): dtype for dtype in DTYPES}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"dtype={name!r}: kernels are compiled beforehand for {', '.join(known)}."
            )
    return [known[name] for name in names]


def names() -> list[str]:
    """The codecs whose kernels can be compiled here, in the order of `cswap.list_codecs`."""
    return [name for name in list_codecs() if _usable(name)]


def steps(
    codecs: Sequence[str],
    jobs: int = 1,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Iterator[str]:
    """Compile or load kernels one by one.

    Args:
        codecs: by name.
        jobs: processes that share the work. 1 stays in this one.
        dtypes: of the tensors; another dtype's kernels are compiled at its first use.

    Yields:
        The name of each codec once its kernels are there, then `PROFILER`. Of several processes, in
        the order in which they end.

    Raises:
        CswapError: there is no such codec.
    """
    names = [get_codec(name).name for name in codecs]
    if jobs == 1:
        yield from (_compile(name, dtypes) for name in (*names, PROFILER))
    else:
        # A fork would copy the locks of threads that torch and Numba have started.
        with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin_process) as pool:
            parts = [pool.submit(_compile, name, dtypes) for name in (*names, PROFILER)]
            yield from (done.result() for done in as_completed(parts))
    if {*lossless_candidates()} <= {*names}:  # nothing is left for a first use
        note_compiled(map(dtype_name, dtypes))


def first_use(dtypes: Sequence[str]) -> None:
    """Compile or load the kernels that a goal without options may choose, in an idle process.

    Args:
        dtypes: names of the tensors' dtypes; there are no kernels for some.
    """
    chosen = [dtype for dtype in DTYPES if dtype_name(dtype) in unmarked(dtypes)]
    with suppress(OSError):
        os.nice(IDLE)
    gc.disable()
    deque(steps(lossless_candidates(), dtypes=chosen), maxlen=0)
    note_compiled(dtypes)


def _begin_process() -> None:
    # As an exception, Ctrl-C would be the result of one part, and the process would go on with the
    # next. Collecting garbage takes a twelfth of the time, and the process ends soon.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()


def _compile(name: str, dtypes: Sequence[torch.dtype]) -> str:
    told_of_compiling.set()  # whoever calls this knows
    if name == PROFILER:
        for dtype in dtypes:
            profile(torch.zeros(64, dtype=dtype))
    else:
        _codec(get_codec(name), dtypes)
    return name


def _usable(name: str) -> bool:
    try:
        codec = get_codec(name)
    except CswapError as error:
        log.debug("codec %r: no kernels to compile: %s", name, error)
        return False
    return any(takes(codec, dtype, "cpu") for dtype in DTYPES)


def _codec(codec: Codec, dtypes: Sequence[torch.dtype]) -> None:
    for dtype in dtypes:
        if not takes(codec, dtype, "cpu"):
            continue
        warm(codec, dtype, CPU)
        if isinstance(codec, TiledCodec):  # several threads share a large tensor
            large = torch.zeros(2 * MIN_RANGE_TILES * tile_numel(dtype), dtype=dtype)
            two_threads = CpuStream(threads=2)
            codec.decode(codec.encode(large, stream=two_threads), stream=two_threads)
