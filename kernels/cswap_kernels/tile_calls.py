"""Tile functions, compiled, and called by the address of their machine code.

An address is an integer: the loops of tiles.py are compiled once for all formats, formats compose
("zvc+expk") without a loop per pair, and a call from Python costs no more than its other arguments.
(Numba's own first-class functions cost about 50 Python calls each time one is passed.)
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

_WORD_TYPES: Final[dict[int, Any]] = {
    1: types.uint8,
    2: types.uint16,
    4: types.uint32,
    8: types.uint64,
}
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
