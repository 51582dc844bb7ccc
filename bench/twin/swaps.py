"""Swaps of single tensors on the twin, as in `bench gpu`: `python -m bench.twin.swaps`."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any, Final

from bench.twin.process import DEVICE, become  # before cswap is imported
from bench.twin.profiles import PROFILES

MIB: Final = 1 << 20
SIZES: Final = (MIB, 64 * MIB, 256 * MIB)
KINDS: Final = {
    "relu-85": ("float32", "relu-85", ("raw", "zvc")),
    "normal": ("float32", "", ("raw", "int8")),
    "normal, bfloat16": ("bfloat16", "", ("raw", "int8", "expk")),
}
"""Data: dtype, maker of the values, codecs."""

ROUNDS: Final = 6


def run(profile: str) -> list[dict[str, Any]]:
    """Seconds out and back, by data, size and codec. Args: profile: of `PROFILES`."""
    cuda = become(PROFILES[profile])
    import torch

    from cswap.config import SwapConfig
    from cswap.devices.cuda import cuda_device
    from cswap.engine.engine import SwapEngine

    cuda.runs_callbacks_of(cuda_device(0))
    gc.disable()  # it would run at other moments in another process
    rows = []
    for data, (dtype_name, maker, codecs) in KINDS.items():
        dtype = getattr(torch, dtype_name)
        for nbytes in SIZES:
            for codec in codecs:
                engine = SwapEngine(SwapConfig(codec=codec, min_bytes=0))
                x = cuda.empty(nbytes // dtype.itemsize, dtype=dtype, device=DEVICE)
                cuda.note_maker(x, maker)
                for _ in range(ROUNDS):
                    cuda.synchronize()
                    times, cuda.counting = [cuda.now_s], True
                    packed: Any = engine.pack(x)
                    times.append(cuda.now_s)
                    engine.synchronize()
                    times.append(cuda.now_s)
                    engine.unpack(packed)
                    times.append(cuda.now_s)
                    cuda.synchronize()
                    times.append(cuda.now_s)
                    cuda.counting, packed = False, None
                began, packed_at, out, unpacked_at, back = times
                row = {"data": data.split(",")[0], "dtype": dtype_name, "nbytes": nbytes}
                row |= {"way": f"cswap {codec}", "out_s": out - began, "back_s": back - out}
                rows.append(row | {"host_s": packed_at - began + unpacked_at - out})
                assert engine.stats.fallbacks == 0
    assert not cuda.faults, cuda.faults[:3]
    return rows


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
