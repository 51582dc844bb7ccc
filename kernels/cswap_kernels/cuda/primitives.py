"""What the CUDA twins are written in: pointers, 16-byte accesses, warp and block operations.

Kernels take plain pointers: one parameter each, no strides, no wrap-around of negative indices.
Under Numba's CUDA simulator (NUMBA_ENABLE_CUDASIM=1) a "pointer" is a numpy array, and what the
simulator lacks comes from simulator.py; the format files are the same for both.

Integers: a bare Python int makes an operation 64 bits wide, at twice the instructions, so every
device function wraps what it computes in ``int32(...)`` or ``uint32(...)``.
"""

from __future__ import annotations

from typing import Any, Final

from numba import config, cuda, int32, types, uint8, uint32

WARP: Final = 32
FULL: Final = 0xFFFFFFFF

if config.ENABLE_CUDASIM:
    from cswap_kernels.cuda.simulator import (
        advance,
        as_u8,
        as_u16,
        as_u32,
        as_u64,
        atomic_add,
        atomic_max,
        atomic_or,
        bits_f32,
        bits_f64,
        f32_bits,
        f64_bits,
        floor,
        funnel_left32,
        funnel_right32,
        load16,
        load_global16,
        rint,
        signed,
        signed64,
        store16,
        store_global16,
        unsigned,
        unsigned64,
    )
else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    _I32, _I64 = ir.IntType(32), ir.IntType(64)
    _VECTOR = ir.VectorType(_I32, 4)

    def _is_memory(kind: Any) -> bool:
        return isinstance(kind, (types.CPointer, types.Array))

    def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
        # The address that an argument stands for: a pointer, or where an array's data begin.
        if isinstance(kind, types.Array):
            return context.make_array(kind)(context, builder, value).data
        return value

    def _reinterpret(target: Any) -> Any:
        def typing(_typing: Any, memory: Any) -> Any:
            if not _is_memory(memory):
                return None

            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                pointer = _data(context, builder, signature.args[0], args[0])
                return builder.bitcast(pointer, context.get_value_type(signature.return_type))

            return types.CPointer(target)(memory), emit

        return intrinsic(typing)

    as_u8 = _reinterpret(types.uint8)
    as_u16 = _reinterpret(types.uint16)
    as_u32 = _reinterpret(types.uint32)
    as_u64 = _reinterpret(types.uint64)

    @intrinsic
    def advance(_typing: Any, pointer: Any, count: Any) -> Any:
        """The pointer ``count`` elements further on."""

        def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.gep(args[0], [args[1]])

        return pointer(pointer, count), emit

    def _address(builder: Any, pointer: Any, index: Any) -> Any:
        # Of the index-th group of 16 bytes.
        if index.type.width < _I64.width:
            index = builder.sext(index, _I64)
        start = builder.ptrtoint(pointer, _I64)
        return builder.add(start, builder.mul(index, ir.Constant(_I64, 16)))

    def _tuple(context: Any, builder: Any, signature: Any, extract: Any) -> Any:
        return context.make_tuple(builder, signature.return_type, [extract(k) for k in range(4)])

    @intrinsic
    def load_global16(_typing: Any, pointer: Any, index: Any) -> Any:
        """The index-th 16 bytes of global memory that nobody writes meanwhile, as 4 u32."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.LiteralStructType([_I32] * 4), [_I64])
            text = "ld.global.nc.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];"
            load = ir.InlineAsm(kind, text, "=r,=r,=r,=r,l", side_effect=True)
            four = builder.call(load, [_address(builder, args[0], args[1])])
            return _tuple(context, builder, signature, lambda k: builder.extract_value(four, k))

        return types.UniTuple(types.uint32, 4)(pointer, index), emit

    @intrinsic
    def store_global16(_typing: Any, pointer: Any, index: Any, four: Any) -> Any:
        """Store 4 u32 as the index-th 16 bytes of global (or pinned host) memory."""

        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [_I64, *[_I32] * 4])
            text = "st.global.cs.v4.u32 [$0], {$1,$2,$3,$4};"
            store = ir.InlineAsm(kind, text, "l,r,r,r,r", side_effect=True)
            words = [builder.extract_value(args[2], k) for k in range(4)]
            builder.call(store, [_address(builder, args[0], args[1]), *words])
            return context.get_dummy_value()

        return types.void(pointer, index, four), emit

    def _vector(builder: Any, pointer: Any, index: Any) -> Any:
        return builder.gep(builder.bitcast(pointer, _VECTOR.as_pointer()), [index])

    @intrinsic
    def load16(_typing: Any, pointer: Any, index: Any) -> Any:
        """The index-th 16 bytes of shared memory, as 4 u32."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            four = builder.load(_vector(builder, args[0], args[1]), align=16)
            return _tuple(
                context,
                builder,
                signature,
                lambda k: builder.extract_element(four, ir.Constant(_I32, k)),
            )

        return types.UniTuple(types.uint32, 4)(pointer, index), emit

    @intrinsic
    def store16(_typing: Any, pointer: Any, index: Any, four: Any) -> Any:
        """Store 4 u32 as the index-th 16 bytes of shared memory."""

        def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            vector = ir.Constant(_VECTOR, ir.Undefined)
            for k in range(4):
                word = builder.extract_value(args[2], k)
                vector = builder.insert_element(vector, word, ir.Constant(_I32, k))
            builder.store(vector, _vector(builder, args[0], args[1]), align=16)
            return context.get_dummy_value()

        return types.void(pointer, index, four), emit

    def _atomic(operation: str) -> Any:
        def typing(_typing: Any, pointer: Any, index: Any, value: Any) -> Any:
            if not isinstance(pointer, types.CPointer):
                return None

            def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                place = builder.gep(args[0], [args[1]])
                return builder.atomic_rmw(operation, place, args[2], "monotonic")

            kind = pointer.dtype
            return kind(pointer, index, kind), emit

        return intrinsic(typing)

    atomic_add = _atomic("add")
    atomic_max = _atomic("umax")
    atomic_or = _atomic("or")

    def _bitcast(source: Any, target: Any) -> Any:
        def typing(_typing: Any, _value: Any) -> Any:
            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return builder.bitcast(args[0], context.get_value_type(signature.return_type))

            return target(source), emit

        return intrinsic(typing)

    f32_bits = _bitcast(types.float32, types.uint32)
    bits_f32 = _bitcast(types.uint32, types.float32)
    f64_bits = _bitcast(types.float64, types.uint64)
    bits_f64 = _bitcast(types.uint64, types.float64)
    signed = _bitcast(types.uint32, types.int32)
    unsigned = _bitcast(types.int32, types.uint32)
    signed64 = _bitcast(types.uint64, types.int64)
    unsigned64 = _bitcast(types.int64, types.uint64)

    def _rounding(instruction: str) -> Any:
        def typing(_typing: Any, _value: Any) -> Any:
            def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
                return builder.call(ir.InlineAsm(kind, f"{instruction} $0, $1;", "=f,f"), [args[0]])

            return types.float32(types.float32), emit

        return intrinsic(typing)

    rint = _rounding("cvt.rni.f32.f32")  # to nearest, ties to even
    floor = _rounding("cvt.rmi.f32.f32")

    def _funnel(instruction: str) -> Any:
        def typing(_typing: Any, _low: Any, _high: Any, _by: Any) -> Any:
            def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                kind = ir.FunctionType(_I32, [_I32] * 3)
                text = f"{instruction} $0, $1, $2, $3;"
                return builder.call(ir.InlineAsm(kind, text, "=r,r,r,r"), args)

            return types.uint32(types.uint32, types.uint32, types.uint32), emit

        return intrinsic(typing)

    # (low, high, by): 64 bits moved by 0 to 31; their high word then, or their low one.
    funnel_left32 = _funnel("shf.l.wrap.b32")
    funnel_right32 = _funnel("shf.r.wrap.b32")


@cuda.jit(device=True)
def lane_id():
    """Index of this thread in its warp."""
    return int32(int32(cuda.threadIdx.x) & int32(31))


@cuda.jit(device=True)
def warp_id():
    """Index of this thread's warp in its block."""
    return int32(int32(cuda.threadIdx.x) >> int32(5))


@cuda.jit(device=True)
def n_warps():
    """Warps of a block: 1, 2, 4, ... 32."""
    return int32(int32(cuda.blockDim.x) >> int32(5))


@cuda.jit(device=True)
def log_warps():
    """Binary logarithm of `n_warps`: to divide by it."""
    return int32(int32(31) - int32(cuda.clz(n_warps())))


@cuda.jit(device=True)
def ballot(predicate):
    """u32: bit i is set if the predicate holds in lane i. The whole warp calls it."""
    return uint32(cuda.ballot_sync(FULL, predicate))


@cuda.jit(device=True)
def warp_inclusive(value):
    """Sum of an i32 over the lanes up to and including this one."""
    lane = lane_id()
    step = int32(1)
    while step < int32(32):
        other = int32(cuda.shfl_up_sync(FULL, value, step))
        if lane >= step:
            value = int32(value + other)
        step = int32(step * int32(2))
    return value


@cuda.jit(device=True)
def block_exclusive(value, tmp):
    """(sum of an i32 over the threads before this one, sum over all). tmp [33] i32, shared.

    Every thread of the block calls it; tmp may be used again at once.
    """
    inclusive = warp_inclusive(value)
    warp = warp_id()
    if lane_id() == int32(31):
        tmp[warp] = uint32(inclusive)
    cuda.syncthreads()
    before, total = int32(0), int32(0)
    for k in range(n_warps()):
        part = int32(tmp[k])
        if int32(k) < warp:
            before = int32(before + part)
        total = int32(total + part)
    cuda.syncthreads()
    return int32(before + inclusive - value), total


@cuda.jit(device=True)
def fill(x, n, value):
    """Set n words of x. Ends with a syncthreads."""
    i = int32(cuda.threadIdx.x)
    while i < n:
        x[i] = value
        i = int32(i + int32(cuda.blockDim.x))
    cuda.syncthreads()


@cuda.jit(device=True)
def warp_sum(value):
    """Sum of an i32 over the lanes, in every lane."""
    step = int32(16)
    while step > int32(0):
        value = int32(value + int32(cuda.shfl_xor_sync(FULL, value, step)))
        step = int32(step >> int32(1))
    return value


@cuda.jit(device=True)
def warp_min(value):
    """Smallest i32 of the lanes, in every lane."""
    step = int32(16)
    while step > int32(0):
        value = int32(min(value, int32(cuda.shfl_xor_sync(FULL, value, step))))
        step = int32(step >> int32(1))
    return value


@cuda.jit(device=True)
def warp_max(value):
    """Largest i32 of the lanes, in every lane."""
    step = int32(16)
    while step > int32(0):
        value = int32(max(value, int32(cuda.shfl_xor_sync(FULL, value, step))))
        step = int32(step >> int32(1))
    return value


@cuda.jit(device=True)
def zero_bytes(dst, first, last):
    """Zero dst[first:last], fewer bytes than a block has threads."""
    i = int32(first + int32(cuda.threadIdx.x))
    if i < last:
        dst[i] = uint8(0)


@cuda.jit(device=True)
def padded(nbytes):
    """The next multiple of 16."""
    return int32((nbytes + int32(15)) & int32(-16))


@cuda.jit(device=True)
def block_sum(value, tmp):
    """Sum of an i32 over the threads of a block, in every thread. Ends with a syncthreads."""
    value = warp_sum(value)
    if lane_id() == int32(0):
        tmp[warp_id()] = unsigned(value)
    cuda.syncthreads()
    total = int32(0)
    for k in range(n_warps()):
        total = int32(total + signed(uint32(tmp[int32(k)])))
    cuda.syncthreads()
    return total


@cuda.jit(device=True)
def block_max(value, tmp):
    """Largest i32 of the threads of a block, in every thread. Ends with a syncthreads."""
    value = warp_max(value)
    if lane_id() == int32(0):
        tmp[warp_id()] = unsigned(value)
    cuda.syncthreads()
    for k in range(n_warps()):
        value = int32(max(value, signed(uint32(tmp[int32(k)]))))
    cuda.syncthreads()
    return value


@cuda.jit(device=True)
def share_of_warp(groups):
    """(first, after the last) of so many groups: each warp takes as many, in order."""
    each = int32((groups + n_warps() - int32(1)) >> log_warps())
    first = min(int32(warp_id() * each), groups)
    return first, min(int32(first + each), groups)
