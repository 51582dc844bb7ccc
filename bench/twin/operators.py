"""`Operators`: a dispatch mode that gives the user's operators a time, and memory without values.

Operators on device memory do not run. Their results have the sizes that torch's meta kernels say;
the memory of them is never touched, so a model of any size fits a small machine. Views run, and so
do operators on host memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bench.twin.profiles import ODD

if TYPE_CHECKING:
    from bench.twin.cuda import ClockedCuda

PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm"})

ONCE: Final = frozenset({"copy_", "fill_", "zero_"})
"""Operators that write their first argument without reading it."""

SPARSE: Final = frozenset({"embedding", "nll_loss_forward"})
"""Operators that read little of their first argument."""


class Operators(TorchDispatchMode):
    """See the top."""

    def __init__(self, cuda: ClockedCuda) -> None:
        """Args: cuda: the stand-in."""
        super().__init__()
        self._cuda = cuda
        self._known: dict[Any, _Known] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Issue an operator on the current stream."""
        kwargs = kwargs or {}
        cuda, name = self._cuda, func._opname  # noqa: SLF001
        counting, cuda.counting = cuda.counting, False
        inside, cuda.in_operator = cuda.in_operator, True
        counts = sys.getprofile()
        sys.setprofile(None)
        try:
            found = self._run(func, name, args, kwargs)
        finally:
            sys.setprofile(counts)
            cuda.counting, cuda.in_operator = counting, inside
        cuda.cost("detach" if name == "detach" else "view" if func.is_view else "operator")
        return found

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        wanted = device is not None and torch.device(device).type == "cuda"
        pinned = kwargs.pop("pin_memory", None)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        here = [t for t in tensors if self._cuda.is_device(t)]
        # A tensor of the device that is cast names the CPU, which it is of below Python.
        if (name == "copy_" and 0 < len(here) < len(tensors)) or (name == "_to_copy" and wanted):
            to_device = wanted or here[0] is args[0]
            return self._copy(name, args, kwargs, to_device=to_device)
        if func.is_view or not (here or wanted):
            if pinned:
                self._cuda.cost("cuda")
            return func(*args, **kwargs)
        if name in ("equal", "_local_scalar_dense", "is_nonzero"):
            self._cuda.stream_now().synchronize()
            return True if name != "_local_scalar_dense" or tensors[0].dtype is torch.bool else 1
        return self._issue(func, args, kwargs, tensors, here)

    def _copy(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, to_device: bool
    ) -> Any:
        cuda = self._cuda
        waits = not (kwargs.get("non_blocking") or args[2:3] == (True,))
        if name == "copy_":
            target, source = args[:2]
        else:
            source = args[0]
            sizes, dtype = tuple(source.shape), kwargs.get("dtype") or source.dtype
            target = cuda.empty(sizes, dtype=dtype, device="cuda")
        on_device = target if to_device else source
        cuda.touch(on_device, writes=to_device, text="copy")
        cuda.copy(source.nbytes, cuda.stream_now(), out=not to_device)
        if waits:
            cuda.stream_now().synchronize()
        return target

    # ---------------------------------------------------------------- operators

    def _issue(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        here: list[torch.Tensor],
    ) -> Any:
        cuda, name = self._cuda, func._opname  # noqa: SLF001
        flat, spec = pytree.tree_flatten((args, kwargs))
        key = (func, spec, *map(_described, flat))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._learn(func, args, kwargs, tensors)
        if known.is_view:
            return func(*args, **kwargs)
        fresh: list[torch.Tensor] = []

        def result(x: Any) -> Any:
            if isinstance(x, _Argument):
                return tensors[x.number]
            if not isinstance(x, _Made):
                return x
            fresh.append(cuda.empty_strided(x.sizes, x.strides, dtype=x.dtype, device="cuda"))
            return fresh[-1]

        results = pytree.tree_map(result, known.results)
        if name.startswith(("empty", "new_empty")):
            return results
        cuda.stream_now().work(known.seconds, name)
        changed = changed_by(func, args, kwargs)
        for x in here:
            cuda.touch(x, writes=any(x is c for c in changed), text=name)
        made = name.strip("_")
        if made in ("relu", "threshold", "clamp_min"):
            made = "add>relu" if here and cuda.maker(here[0]) == "add" else "relu"
        for x in fresh:
            cuda.touch(x, writes=True, text=name)
        for x in (*fresh, *changed):
            cuda.note_maker(x, made)
        return results

    def _learn(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> _Known:
        metas: dict[int, torch.Tensor] = {}
        numbers: dict[int, int] = {}
        storages: set[int] = set()

        def to_meta(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return torch.device("meta") if isinstance(x, torch.device) else x
            if id(x) not in metas:
                made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                metas[id(x)] = made
                numbers[id(made)] = next(i for i, t in enumerate(tensors) if t is x)
                storages.add(made.untyped_storage()._cdata)  # noqa: SLF001
            return metas[id(x)]

        out = func(*pytree.tree_map(to_meta, args), **pytree.tree_map(to_meta, kwargs))
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [t for t in results if id(t) not in numbers]
        if any(t.untyped_storage()._cdata in storages for t in fresh):  # noqa: SLF001
            return _Known(None, 0.0, is_view=True)

        def described(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) in numbers:
                return _Argument(numbers[id(x)])
            return _Made(tuple(x.shape), x.stride(), x.dtype)

        seconds = self._seconds(func, args, kwargs, (tensors, fresh, out))
        return _Known(pytree.tree_map(described, out), seconds)

    def _seconds(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        of: tuple[list[torch.Tensor], list[torch.Tensor], Any],
    ) -> float:
        # By a roofline: the work at a rate, or the bytes at the memory's, and a kernel's least.
        read, fresh, out = of
        p, name = self._cuda.profile, func._opname  # noqa: SLF001
        changed = changed_by(func, args, kwargs)
        read = read[1:] if name in ONCE or name in SPARSE else read
        if name == "nll_loss_backward":  # writes one element of a row
            read = []
        nbytes = sum(map(_extent, (*fresh, *changed, *read)))
        formula = flop_registry.get(func._overloadpacket)  # noqa: SLF001
        flops = float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
        dtype = next((t.dtype for t in (*read, *fresh) if t.is_floating_point()), torch.float32)
        rate = p.fp32
        if "attention" in name:
            rate, flops = p.attention, flops / 2 if _is_causal(args, kwargs) else flops
        elif dtype.itemsize == 2:
            rate = p.bf16 * (_share(read, p.half) if name in PRODUCTS else 1.0)
        elif "convolution" in name:
            rate = p.tf32
        return max(flops / rate, nbytes / p.memory) + p.kernel_s


@dataclass(frozen=True, slots=True)
class _Argument:
    """A result that is an argument: its number among the tensors."""

    number: int


@dataclass(frozen=True, slots=True)
class _Made:
    """A result of its own."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Known:
    """Results and time of an operator with arguments of these sizes.

    Attributes:
        results: as it returns them, with `_Argument` and `_Made` for tensors.
        seconds: on the device.
        is_view: it makes a view, though it does not say so.
    """

    results: Any
    seconds: float
    is_view: bool = False


def _described(x: Any) -> Any:
    # Of an argument, as far as results depend on it.
    if isinstance(x, torch.Tensor):
        return tuple(x.shape), x.stride(), x.dtype
    return type(x), x


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors that an operator writes in place. Args: func: it; args, kwargs: its arguments."""
    found = [
        args[n] if n < len(args) else kwargs.get(a.name)
        for n, a in enumerate(func._schema.arguments)  # noqa: SLF001
        if a.alias_info and a.alias_info.is_write
    ]
    return [t for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]


def _extent(x: torch.Tensor) -> int:
    return min(x.nbytes, x.untyped_storage().nbytes())


def _share(read: list[torch.Tensor], half: float) -> float:
    # Of the peak, that a product of these matrices reaches.
    a, b = [t for t in read if t.dim() >= 2][:2]
    sizes = (a.numel() // a.shape[-1], a.shape[-1], b.shape[-1])
    least = min(sizes)
    return least / (least + half) * (ODD if any(n % 8 for n in sizes) else 1.0)


def _is_causal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(a is True for a in args) or bool(kwargs.get("is_causal"))
