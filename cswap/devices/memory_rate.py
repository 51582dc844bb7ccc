"""The rate of a device's memory: seconds of operators that nobody has timed follow from it."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import torch

from cswap.devices.stopwatch import CudaStopwatch

CPU_BYTES_PER_S: Final = 4e9
"""Of elementwise operators, with one thread and cold caches: assumed, not measured."""

CUDA_BYTES_PER_S: Final = 1.5e12
"""Of a GPU that has no memory to measure it: assumed."""

PROBE_BYTES: Final = 64 << 20
"""Copied to measure it: more than the caches of a GPU hold."""

N_PROBES: Final = 4
"""Copies that are timed, while the device is busy with one before them."""

_measured: dict[int, float] = {}


def memory_rate(device: torch.device, *, assumed: bool = False) -> float:
    """Bytes/s that elementwise operators read and write. A GPU's is measured once.

    Args:
        device: of the memory.
        assumed: whether no measured rate may count, since all ranks have to decide alike, say.
    """
    if device.type != "cuda":
        return CPU_BYTES_PER_S
    index = device.index or 0
    if not assumed and index not in _measured and CudaStopwatch(index).is_on():
        _measured[index] = CUDA_BYTES_PER_S  # it is asked once, even if there is no memory
        with suppress(torch.OutOfMemoryError):
            _measured[index] = _measure(index)
    return CUDA_BYTES_PER_S if assumed else _measured.get(index, CUDA_BYTES_PER_S)


def _measure(index: int) -> float:
    watch = CudaStopwatch(index)
    source = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=torch.device("cuda", index))
    target = torch.empty_like(source)
    target.copy_(source)
    began = watch.mark()
    for _ in range(N_PROBES):
        target.copy_(source)
    seconds = watch.seconds(began, watch.mark())
    return 2 * N_PROBES * PROBE_BYTES / seconds if seconds else CUDA_BYTES_PER_S
