"""Tile functions, compiled, and called by the address of their machine code; arrays by address.

An address is an integer: the loops of tiles.py are compiled once for all formats, formats compose
("zvc+expk") without a loop per pair, and a call from Python costs no more than its other arguments.
(Numba's own first-class functions cost about 50 Python calls each time one is passed.) For the same
reason a tensor's memory can be passed as an address and a length: to make a NumPy array of it takes
longer than a kernel needs for 16 KiB.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

if TYPE_CHECKING:
    from collections.abc import Callable

_WORD_TYPES: Final[dict[int, Any]] = {
    1: types.uint8,
    2: types.uint16,
    4: types.uint32,
    8: types.uint64,
}
WORD_LIKE: Final = {1: np.uint8(0), 2: np.uint16(0), 4: np.uint32(0), 8: np.uint64(0)}
"""For `array_at`: any value of the word type, by bytes per word."""

_BYTES = types.Array(types.uint8, 1, "C")
_ARGS = types.Array(types.uint64, 1, "C")


class TileFunction:
    """A compiled tile function (contract: tiles.py).

    Attributes:
        address: of its machine code, which lives as long as this object.
    """

    def __init__(self, function: Any, signature: Any) -> None:
        """Compile ``function`` for Numba's ``signature``, or load it from the disk cache."""
        function.compile(signature)
        compiled = function.overloads[signature.args]
        self._library = compiled.library  # keeps the machine code alive
        name = compiled.fndesc.llvm_cfunc_wrapper_name
        self.address = int(compiled.library.get_pointer_to_function(name))


@cache
def tile_encoder(function: Callable[..., int], word: int) -> TileFunction:
    """Compile (or load from the disk cache) an ``encode_tile`` for words of ``word`` bytes."""
    words = types.Array(_WORD_TYPES[word], 1, "C")
    return TileFunction(function, types.int64(words, _BYTES, _ARGS, types.int64))


@cache
def tile_decoder(function: Callable[..., int], word: int) -> TileFunction:
    """Compile (or load from the disk cache) a ``decode_tile`` for words of ``word`` bytes."""
    words = types.Array(_WORD_TYPES[word], 1, "C")
    return TileFunction(function, types.int64(_BYTES, words, _ARGS, types.int64))


def _emit_call(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    # args[0] is the address of a tile function, the others are its arguments.
    kinds = [context.get_value_type(kind) for kind in signature.args[1:]]
    function = ir.FunctionType(context.get_value_type(signature.return_type), kinds)
    return builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])


@intrinsic
def call_encoder(typing: Any, address: Any, words: Any, dst: Any, args: Any, first: Any) -> Any:
    """Call the ``encode_tile`` at an address."""
    return types.int64(address, words, dst, args, types.int64), _emit_call


@intrinsic
def call_decoder(typing: Any, address: Any, src: Any, words: Any, args: Any, first: Any) -> Any:
    """Call the ``decode_tile`` at an address."""
    return types.int64(address, src, words, args, types.int64), _emit_call


def _emit_array(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    kind = signature.return_type
    word = context.get_data_type(kind.dtype)
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(word))
    array = arrayobj.make_array(kind)(context, builder)
    arrayobj.populate_array(
        array,
        data=builder.inttoptr(args[1], word.as_pointer()),
        shape=cgutils.pack_array(builder, [args[2]]),
        strides=cgutils.pack_array(builder, [itemsize]),
        itemsize=itemsize,
        meminfo=None,
    )
    return array._getvalue()  # noqa: SLF001 Numba has no other name for it


@intrinsic
def array_at(typing: Any, like: Any, address: Any, length: Any) -> Any:
    """The array [length] of like's type at an address; its memory is the caller's business."""
    return types.Array(like, 1, "C")(like, types.intp, types.intp), _emit_array
