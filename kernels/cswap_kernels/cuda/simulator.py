"""Operations that Numba's CUDA simulator lacks: those of warps, and of memory (primitives.py).

For tests (NUMBA_ENABLE_CUDASIM=1). Warps are taken to be converged: divergence and races between
threads are not modelled. Its own way of running a block polls every thread in a busy loop, which
takes most of the time; here the threads of a block meet at a barrier.
"""

from __future__ import annotations

import math
import sys
import threading
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numba.cuda.simulator import kernel as simulated
from numba.cuda.simulator import kernelapi
from numba.np.numpy_support import as_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Memory = NDArray[Any]

TIMEOUT_S = 60


def _plain(memory: Any) -> Memory:
    # A kernel's argument is wrapped; its wrapper's "view" may be a copy.
    item = memory.__dict__.get("_item") if hasattr(memory, "__dict__") else None
    array: Memory = memory if item is None else item._ary  # noqa: SLF001
    return array


def _view(memory: Any, dtype: Any) -> Memory:
    array, word = _plain(memory), np.dtype(dtype).itemsize
    return array[: array.nbytes // word * word // array.itemsize].view(dtype)


def as_u8(memory: Memory) -> Memory:
    """The same memory as bytes."""
    return _view(memory, np.uint8)


def as_u16(memory: Memory) -> Memory:
    """The same memory as u16."""
    return _view(memory, np.uint16)


def as_u32(memory: Memory) -> Memory:
    """The same memory as u32."""
    return _view(memory, np.uint32)


def as_u64(memory: Memory) -> Memory:
    """The same memory as u64."""
    return _view(memory, np.uint64)


def advance(memory: Memory, count: int) -> Memory:
    """The memory from element ``count`` on."""
    return _plain(memory)[int(count) :]


def load16(memory: Memory, index: int) -> tuple[Any, Any, Any, Any]:
    """The index-th 16 bytes, as 4 u32."""
    data = as_u8(memory)[16 * int(index) : 16 * int(index) + 16].view(np.uint32)
    return data[0], data[1], data[2], data[3]


def store16(memory: Memory, index: int, four: tuple[Any, Any, Any, Any]) -> None:
    """Store 4 u32 as the index-th 16 bytes."""
    data = np.array(four, np.uint32).view(np.uint8)
    as_u8(memory)[16 * int(index) : 16 * int(index) + 16] = data


load_global16, store_global16 = load16, store16


def f32_bits(value: Any) -> Any:
    """The bits of a float32, as u32."""
    return np.float32(value).view(np.uint32)


def bits_f32(value: Any) -> Any:
    """The float32 of these bits."""
    return np.uint32(value).view(np.float32)


def f64_bits(value: Any) -> Any:
    """The bits of a float64, as u64."""
    return np.float64(value).view(np.uint64)


def bits_f64(value: Any) -> Any:
    """The float64 of these bits."""
    return np.uint64(value).view(np.float64)


def signed(value: Any) -> Any:
    """The i32 of the same bits as a u32."""
    return np.uint32(value).view(np.int32)


def unsigned(value: Any) -> Any:
    """The u32 of the same bits as an i32."""
    return np.int32(value).view(np.uint32)


def signed64(value: Any) -> Any:
    """The i64 of the same bits as a u64."""
    return np.uint64(value).view(np.int64)


def unsigned64(value: Any) -> Any:
    """The u64 of the same bits as an i64."""
    return np.int64(value).view(np.uint64)


def rint(value: Any) -> Any:
    """A float32 rounded to the nearest whole number, ties to even."""
    return np.rint(np.float32(value))


def floor(value: Any) -> Any:
    """The largest whole number not above a float32."""
    return np.floor(np.float32(value))


def fused(a: Any, b: Any, c: Any) -> Any:
    """A * b + c with one rounding."""
    values = [float(v) for v in (a, b, c)]
    if not all(map(math.isfinite, values)):
        return np.float32(values[0] * values[1] + values[2])
    exact = Fraction(values[0]) * Fraction(values[1]) + Fraction(values[2])
    return nearest_float32(exact) if exact else np.float32(values[0] * values[1] + values[2])


def nearest_float32(exact: Fraction) -> Any:
    """The float32 nearest to a number that is not 0, ties to even."""
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = float(round(size / step) * step)  # a Fraction rounds ties to even
    with np.errstate(over="ignore"):
        return np.float32(math.copysign(rounded, exact))


def lesser(a: Any, b: Any) -> Any:
    """The lesser of two float32; of a number and NaN, the number."""
    return np.fmin(np.float32(a), np.float32(b))


def greater(a: Any, b: Any) -> Any:
    """The greater of two float32; of a number and NaN, the number."""
    return np.fmax(np.float32(a), np.float32(b))


def architecture() -> int:
    """Below every architecture: no instruction may be used that not all of them have."""
    return 0


def permuting(selector: int) -> Callable[[Any, Any], Any]:
    """The function that picks four bytes of the eight of a and b, or their signs."""

    def permute(a: Any, b: Any) -> Any:
        both = b"".join((int(v) & 0xFFFFFFFF).to_bytes(4, "little") for v in (a, b))
        found = []
        for k in range(4):
            digit = selector >> 4 * k & 15
            byte = both[digit & 7]
            found.append((byte >> 7) * 255 if digit & 8 else byte)
        return np.uint32(int.from_bytes(bytes(found), "little"))

    return permute


_atomics = threading.Lock()


def atomic_add(memory: Memory, index: int, value: Any) -> Any:
    """Add; the value before. As unsigned addition, it wraps around."""
    with _atomics, np.errstate(over="ignore"):
        array = _plain(memory)
        before = array[int(index)]
        array[int(index)] = before + array.dtype.type(value)
        return before


def atomic_max(memory: Memory, index: int, value: Any) -> Any:
    """Raise to ``value``; the value before."""
    with _atomics:
        array = _plain(memory)
        before = array[int(index)]
        array[int(index)] = max(before, value)
        return before


def atomic_or(memory: Memory, index: int, value: Any) -> Any:
    """Set the bits of ``value``; the value before."""
    with _atomics:
        array = _plain(memory)
        before = array[int(index)]
        array[int(index)] = before | array.dtype.type(value)
        return before


def funnel_left32(low: Any, high: Any, by: Any) -> Any:
    """The high word of 64 bits moved left by 0 to 31."""
    both = int(high) << 32 | int(low)
    return np.uint32((both << (int(by) & 31) >> 32) & 0xFFFFFFFF)


def funnel_right32(low: Any, high: Any, by: Any) -> Any:
    """The low word of 64 bits moved right by 0 to 31."""
    both = int(high) << 32 | int(low)
    return np.uint32((both >> (int(by) & 31)) & 0xFFFFFFFF)


class _Warp:
    """Lets the lanes of one warp exchange a value."""

    def __init__(self, n_lanes: int) -> None:
        self.barrier = threading.Barrier(n_lanes)
        self.values: list[Any] = [None] * n_lanes


_register = threading.Lock()


def _exchange(value: Any) -> tuple[list[Any], int]:
    thread: Any = threading.current_thread()
    manager, lane = thread._manager, thread.thread_id % 32  # noqa: SLF001
    with _register:
        warps = manager.__dict__.setdefault("cswap_warps", {})
        n_threads = int(np.prod(manager._block_dim))  # noqa: SLF001
        first = thread.thread_id - lane
        warp = warps.setdefault(first, _Warp(min(32, n_threads - first)))
    warp.values[lane] = value
    warp.barrier.wait(TIMEOUT_S)
    values = list(warp.values)
    warp.barrier.wait(TIMEOUT_S)
    return values, lane


def redux_add(value: Any) -> Any:
    """The sum over the lanes."""
    return np.int32(sum(int(v) for v in _exchange(value)[0]))


def redux_min(value: Any) -> Any:
    """The least of the lanes."""
    return min(_exchange(value)[0])


def redux_max(value: Any) -> Any:
    """The greatest of the lanes."""
    return max(_exchange(value)[0])


redux_max_u32 = redux_max


def _bits(values: list[Any], mask: int) -> int:
    return sum(1 << i for i, value in enumerate(values) if value) & int(mask)


def _ballot_sync(_module: object, mask: int, predicate: Any) -> int:
    return _bits(_exchange(bool(predicate))[0], mask)


def _any_sync(_module: object, mask: int, predicate: Any) -> bool:
    return _bits(_exchange(bool(predicate))[0], mask) != 0


def _all_sync(_module: object, mask: int, predicate: Any) -> bool:
    return all(_exchange(bool(predicate))[0])


def _match_any_sync(_module: object, mask: int, value: Any) -> int:
    values, lane = _exchange(value)
    return _bits([other == values[lane] for other in values], mask)


def _syncwarp(_module: object, _mask: int = 0) -> None:
    _exchange(None)


def _shuffle(source: Callable[[int, int], int]) -> Callable[..., Any]:
    def shuffle(_module: object, _mask: int, value: Any, which: Any) -> Any:
        values, lane = _exchange(value)
        other = source(lane, int(which))
        return values[other] if 0 <= other < len(values) else value

    return shuffle


def _popc(_module: object, value: Any) -> int:
    return (int(value) & (2**64 - 1)).bit_count()


def _clz(_module: object, value: Any) -> int:
    return 8 * np.asarray(value).itemsize - int(value).bit_length()


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "ballot_sync": _ballot_sync,
    "any_sync": _any_sync,
    "all_sync": _all_sync,
    "match_any_sync": _match_any_sync,
    "syncwarp": _syncwarp,
    "shfl_sync": _shuffle(lambda _lane, which: which % 32),
    "shfl_up_sync": _shuffle(lambda lane, by: lane - by),
    "shfl_down_sync": _shuffle(lambda lane, by: lane + by),
    "shfl_xor_sync": _shuffle(lambda lane, mask: lane ^ mask),
    "popc": _popc,
    "clz": _clz,
}

for _name, _operation in _OPERATIONS.items():
    setattr(kernelapi.FakeCUDAModule, _name, _operation)


def _run_block(manager: Any, grid_point: Any, *args: Any) -> None:
    threads = [
        simulated.BlockThread(
            lambda: manager._f(*args),  # noqa: SLF001
            manager,
            grid_point,
            point,
            manager._debug,  # noqa: SLF001
        )
        for point in np.ndindex(*manager._block_dim)  # noqa: SLF001
    ]
    manager.cswap_barrier = threading.Barrier(len(threads))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [t.exception for t in threads if t.exception]
    first = [e for e in failed if not isinstance(e[0], threading.BrokenBarrierError)] or failed
    if first:
        raise first[0][0].with_traceback(first[0][1])


def _meet(thread: Any) -> None:
    thread._manager.cswap_barrier.wait(TIMEOUT_S)  # noqa: SLF001


_run_thread = simulated.BlockThread.run


def _run_and_report(thread: Any) -> None:
    _run_thread(thread)
    if thread.exception:  # the others would wait for it in vain
        thread._manager.cswap_barrier.abort()  # noqa: SLF001
        for warp in thread._manager.__dict__.get("cswap_warps", {}).values():  # noqa: SLF001
            warp.barrier.abort()


def _shared_array(shared: Any, shape: int, dtype: Any, alignment: int | None = None) -> Any:
    # As its own, which has no ``alignment``: one array per line of the program.
    frame: Any = sys._getframe(1)  # noqa: SLF001
    key = (frame.f_code.co_filename, frame.f_lineno)
    with _register:
        if key not in shared._allocations:  # noqa: SLF001
            junk = np.full(shape * as_dtype(dtype).itemsize, 0xA5, np.uint8)
            shared._allocations[key] = junk.view(as_dtype(dtype))  # noqa: SLF001
        return shared._allocations[key]  # noqa: SLF001


kernelapi.FakeCUDAShared.array = _shared_array
simulated.BlockManager.run = _run_block
simulated.BlockThread.syncthreads = _meet
simulated.BlockThread.run = _run_and_report
