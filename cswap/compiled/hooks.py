"""Saved-tensor hooks that AOTAutograd traces into the graphs of forward and backward.

Note [hooks that are graphs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where both hooks are `torch.fx.GraphModule`, AOTAutograd calls them while it traces, once per saved
value, and appends the result to forward and puts the inverse in front of backward. So the compiler
sees the codec, and fuses it with the operator that made the value. By default torch does so for
intermediate values only, which nobody else holds. Dynamo compares the hooks with those that a graph
was compiled under, by identity: so there is one pair per choice of options.

Operators that run eagerly under the hooks (a loss outside of the compiled model, say) are left
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._functorch._aot_autograd import utils as aot_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import saved_tensors_hooks

from cswap.api import swapping
from cswap.compiled.codecs import codec_for, decode, encode
from cswap.compiled.graph import must_stay_exact
from cswap.config import parse_bytes
from cswap.engine.packer import Packer
from cswap.engine.saved.packed import Kept
from cswap.errors import ConfigError
from cswap.log import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

LOSSY: Final = ("off", "bf16", "int8")
DEFAULT_MIN_BYTES: Final = 64 << 10
FORMAT: Final = 1
"""Version of the codecs and of the rules in graph.py, in the key of torch's cache of graphs."""


def inlined(
    lossy: str = "off", *, min_bytes: int | str = DEFAULT_MIN_BYTES
) -> AbstractContextManager[Any]:
    """Encode a compiled model's tensors inside of its graphs, where the compiler fuses the codec.

    The forward of a model under `torch.compile` is called inside of the ``with``; backward may run
    inside or after it. Nothing moves to the host: encodings stay on the device. Booleans are packed
    to bits in any case, and bit-equal.

    Args:
        lossy: "off": booleans alone. "int8": floating-point values take a byte, in groups of 128
            that share a scale. "bf16": float32 and float64 are rounded to bfloat16. Values that an
            exponential needs, and results of reductions, keep their bits.
        min_bytes: smaller values stay as they are.

    Returns:
        A context manager. With a torch that cannot trace hooks it is `cswap.swapping` with the same
        lossy codec, whose hooks run between the graphs; that is logged once.

    Raises:
        ConfigError: a wrong option.

    >>> import cswap, torch
    >>> model = torch.compile(torch.nn.Linear(64, 64), backend="aot_eager")
    >>> with cswap.inlined("int8"):
    ...     loss = model(torch.randn(8, 64)).sum()
    >>> loss.backward()
    """
    if lossy not in LOSSY:
        raise ConfigError(
            f"lossy={lossy!r}: must be one of {', '.join(LOSSY)}: codecs of fixed size."
        )
    least = parse_bytes(min_bytes, "min_bytes")
    if not _can_trace():
        return swapping(lossy=lossy, min_bytes=least)
    return saved_tensors_hooks(*_hooks(lossy, least))


@cache
def _can_trace() -> bool:
    # Without the graphs around a value, nobody could tell which values must stay exact.
    if _tell() is not None and hasattr(aot_utils, "saved_tensors_hooks_are_inlineable"):
        return True
    log.warning(
        "inlined: torch %s traces no hooks; they run between the graphs instead.", torch.__version__
    )
    return False


@cache
def _hooks(lossy: str, min_bytes: int) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    return (
        _graph(pack, lossy, min_bytes, name=f"cswap-pack-{FORMAT}-{lossy}-{min_bytes}"),
        _graph(unpack, name=f"cswap-unpack-{FORMAT}"),
    )


def _graph(function: Any, *options: Any, name: str) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("saved"), *options)))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    module.meta["user_cache_hash"] = name
    return module


def pack(saved: torch.Tensor, lossy: str, min_bytes: int) -> Any:
    """The values that a graph saves instead of one: its encoding, or the value itself."""
    if not isinstance(saved, FakeTensor | FunctionalTensor):
        return Packer.pass_through(saved)  # eager: see Note [hooks that are graphs]
    n: Any = saved.numel()  # a symbol, where shapes are
    if isinstance(n, int) and n * saved.element_size() < min_bytes:
        return saved
    codec = codec_for(saved, lossy)
    tell = _tell()
    if codec is None or (codec != "mask" and tell is not None and must_stay_exact(tell())):
        return saved
    return encode(saved, codec)


def unpack(packed: Any) -> torch.Tensor:
    """The value that `pack` was given."""
    if isinstance(packed, Kept):
        return packed.unpack()
    return packed if isinstance(packed, torch.Tensor) else decode(*packed)


def _tell() -> Callable[[], dict[str, Any]] | None:
    # torch's function that gives the node of the value being packed, and the graphs around it.
    try:
        from torch._functorch._aot_autograd import graph_compile
    except ImportError:
        return None
    return getattr(graph_compile, "_get_saved_tensor_hook_context", None)
