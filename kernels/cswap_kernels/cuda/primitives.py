"""Instructions that Numba lacks: pointers, 16-byte accesses, and single machine instructions.

Kernels take plain pointers: one parameter each, no strides, no wrap-around of negative indices.

Some instructions exist from one architecture on. Whoever calls them asks `architecture` first; the
compiler drops the branch that is not taken.

Integers: a bare Python int makes an operation 64 bits wide, at twice the instructions, so every
device function wraps its result in ``int32(...)`` or ``uint32(...)``.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

FULL: Final = 0xFFFFFFFF
"""A mask that names all lanes of a warp."""

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
        load = ir.InlineAsm(kind, text, "=r,=r,=r,=r,l")
        place = [_address(builder, args[0], args[1])]
        four = builder.call(load, place, attrs=("readnone", "nounwind"))
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

_LETTERS = {types.float32: "f", types.uint32: "r", types.int32: "r"}


def _instruction(text: str, result: Any, *operands: Any, warp: bool = False) -> Any:
    # An intrinsic that is one PTX instruction: result $0, operands $1 and so on. ``warp`` is
    # set where lanes meet: the compiler must not move it into a branch.
    letters = ",".join(["=" + _LETTERS[result], *(_LETTERS[kind] for kind in operands)])

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in operands]
        kind = ir.FunctionType(context.get_value_type(result), kinds)
        code = ir.InlineAsm(kind, text, letters, side_effect=warp)
        attributes = ("convergent",) if warp else ("readnone", "nounwind")
        return builder.call(code, args, attrs=attributes)

    def one(_typing: Any, _a: Any) -> Any:
        return result(*operands), emit

    def two(_typing: Any, _a: Any, _b: Any) -> Any:
        return result(*operands), emit

    def three(_typing: Any, _a: Any, _b: Any, _c: Any) -> Any:
        return result(*operands), emit

    return intrinsic((one, two, three)[len(operands) - 1])


_F32, _U32, _S32 = types.float32, types.uint32, types.int32

# To a whole number: to nearest, ties to even; the largest one not above.
rint = _instruction("cvt.rni.f32.f32 $0, $1;", _F32, _F32)
floor = _instruction("cvt.rmi.f32.f32 $0, $1;", _F32, _F32)
# a * b + c with one rounding.
fused = _instruction("fma.rn.f32 $0, $1, $2, $3;", _F32, _F32, _F32, _F32)
# The lesser and the greater of two numbers; of a number and NaN, the number.
lesser = _instruction("min.f32 $0, $1, $2;", _F32, _F32, _F32)
greater = _instruction("max.f32 $0, $1, $2;", _F32, _F32, _F32)
# (low, high, by): 64 bits moved by 0 to 31; their high word then, or their low one.
funnel_left32 = _instruction("shf.l.wrap.b32 $0, $1, $2, $3;", _U32, _U32, _U32, _U32)
funnel_right32 = _instruction("shf.r.wrap.b32 $0, $1, $2, $3;", _U32, _U32, _U32, _U32)


def permuting(selector: int) -> Any:
    """The intrinsic (a, b) -> u32 whose byte k is byte d of the eight bytes of a and b.

    d is hexadecimal digit k of the selector. A digit from 8 on stands for the sign bit of byte
    (digit - 8), eight times.
    """
    return _instruction(f"prmt.b32 $0, $1, $2, {selector:#06x};", _U32, _U32, _U32)


# From sm_80 on: over all lanes of the warp.
redux_add = _instruction("redux.sync.add.s32 $0, $1, -1;", _S32, _S32, warp=True)
redux_min = _instruction("redux.sync.min.s32 $0, $1, -1;", _S32, _S32, warp=True)
redux_max = _instruction("redux.sync.max.s32 $0, $1, -1;", _S32, _S32, warp=True)
redux_max_u32 = _instruction("redux.sync.max.u32 $0, $1, -1;", _U32, _U32, warp=True)


@intrinsic
def architecture(_typing: Any) -> Any:
    """Ten times the architecture that is compiled for, 900 of sm_90; a constant."""

    def emit(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        # NVVM replaces the call by the number, as for libdevice.
        module, name = builder.module, "__nvvm_reflect"
        text = bytearray(b"__CUDA_ARCH\0")
        kind = ir.ArrayType(ir.IntType(8), len(text))
        question = module.globals.get("cswap_architecture")
        if question is None:
            question = ir.GlobalVariable(module, kind, "cswap_architecture")
            question.global_constant, question.linkage = True, "internal"
            question.initializer = ir.Constant(kind, text)
        signature = ir.FunctionType(_I32, [ir.IntType(8).as_pointer()])
        reflect = module.globals.get(name) or ir.Function(module, signature, name)
        start = question.gep([ir.Constant(_I32, 0), ir.Constant(_I32, 0)])
        return builder.call(reflect, [start])

    return types.int32(), emit
