"""A queue of chunks that threads take one by one, and finish in order.

    queue [3] i64: the next chunk to take, the chunk whose turn it is, a value that is passed on

Running threads take chunks in order. So a thread that waits for its turn waits for a thread that is
working. The queue never hangs, even with a single thread, and a slow thread delays others at most
by its own chunk.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cswap_kernels.jit import njit
from cswap_kernels.words import I64, emit_pointer, get, put


@intrinsic
def take(typing: Any, queue: Any) -> Any:
    """Number of the next chunk; no two threads get the same."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        next_chunk = emit_pointer(context, builder, queue, args[0], ir.Constant(I64, 0), I64)
        return builder.atomic_rmw("add", next_chunk, ir.Constant(I64, 1), "monotonic")

    return types.int64(queue), generate


@intrinsic
def _turn(typing: Any, queue: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        turn = emit_pointer(context, builder, queue, args[0], ir.Constant(I64, 1), I64)
        return builder.load_atomic(turn, "acquire", 8)

    return types.int64(queue), generate


@intrinsic
def _set_turn(typing: Any, queue: Any, chunk: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        turn = emit_pointer(context, builder, queue, args[0], ir.Constant(I64, 1), I64)
        builder.store_atomic(args[1], turn, "release", 8)
        return context.get_dummy_value()

    return types.void(queue, types.int64), generate


@intrinsic
def _let_others_run(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fnty = ir.FunctionType(ir.IntType(32), [])
        function = cgutils.get_or_insert_function(builder.module, fnty, "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@njit(nogil=True, cache=True)
def wait_and_add(queue, chunk, amount):
    """Wait for the turn of a chunk, add to the value that is passed on, return the old value."""
    while _turn(queue) != chunk:
        _let_others_run()
    before = get(queue, 2)
    put(queue, 2, before + amount)
    _set_turn(queue, chunk + 1)
    return before
