"""`Operators`: a dispatch mode that gives the user's operators a time, and memory without values.

Operators on device memory do not run. Their results have the sizes that torch's meta kernels say;
the memory of them is never touched, so a model of any size fits a small machine. Views run, and so
do operators on host memory.
"""

from __future__ import annotations

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
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuda = cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Issue an operator on the current stream."""
        kwargs = kwargs or {}
        cuda, name = self._cuda, func._opname  # noqa: SLF001
        counting, cuda.counting = cuda.counting, False
        try:
            found = self._run(func, name, args, kwargs)
        finally:
            cuda.counting = counting
        cuda.cost("view" if func.is_view else "operator")
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
        return self._issue(func, name, args, kwargs, tensors, here)

    def _copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, to_device: bool) -> Any:
        cuda = self._cuda
        if name == "copy_":
            target, source, waits = args[0], args[1], not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            source, waits = args[0], not kwargs.get("non_blocking")
            make = cuda.empty if to_device else torch.empty
            options = {"device": "cuda"} if to_device else {}
            target = make(tuple(source.shape), dtype=kwargs.get("dtype") or source.dtype, **options)
        on_device = target if to_device else source
        cuda.touch(on_device, writes=to_device, text="copy")
        cuda.copy(source.nbytes, self._cuda.stream_now(), out=not to_device)
        if waits:
            self._cuda.stream_now().synchronize()
        return target

    # ---------------------------------------------------------------- operators

    def _issue(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        here: list[torch.Tensor],
    ) -> Any:
        metas: dict[int, torch.Tensor] = {}
        back: dict[int, torch.Tensor] = {}
        storages: set[int] = set()

        def to_meta(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return "meta" if isinstance(x, torch.device) else x
            if id(x) not in metas:
                made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                metas[id(x)], back[id(made)] = made, x
                storages.add(made.untyped_storage()._cdata)  # noqa: SLF001
            return metas[id(x)]

        out = func(*pytree.tree_map(to_meta, args), **pytree.tree_map(to_meta, kwargs))
        fresh: list[torch.Tensor] = []

        def to_device(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) in back:
                return back[id(x)]
            if x.untyped_storage()._cdata in storages:  # noqa: SLF001 - a view after all
                raise NotImplementedError(name)
            made = self._cuda.empty_strided(
                tuple(x.shape), x.stride(), dtype=x.dtype, device="cuda"
            )
            fresh.append(made)
            return made

        try:
            result = pytree.tree_map(to_device, out)
        except NotImplementedError:
            return func(*args, **kwargs)
        if name.startswith(("empty", "new_empty")):
            return result
        changed = _changed(func, args, kwargs)
        self._charge(func, name, args, kwargs, (tensors, fresh, changed, out))
        for x in here:
            self._cuda.touch(x, writes=any(x is c for c in changed), text=name)
        for x in fresh:
            self._cuda.touch(x, writes=True, text=name)
        made = name.strip("_")
        if made in ("relu", "threshold", "clamp_min"):
            made = "add>relu" if here and self._cuda.maker(here[0]) == "add" else "relu"
        for x in (*fresh, *changed):
            self._cuda.note_maker(x, made)
        return result

    def _charge(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        of: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], Any],
    ) -> None:
        read, fresh, changed, out = of
        p = self._cuda.profile
        skipped = read[1:] if name in ONCE or name in SPARSE else read
        nbytes = sum(map(_extent, (*fresh, *changed, *skipped)))
        if name == "nll_loss_backward":
            nbytes = sum(map(_extent, fresh))
        formula = flop_registry.get(func._overloadpacket)  # noqa: SLF001
        flops = float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
        dtype = next((t.dtype for t in (*read, *fresh) if t.is_floating_point()), torch.float32)
        rate = p.fp32
        if "attention" in name:
            rate, flops = p.attention, flops / 2 if _is_causal(args, kwargs) else flops
        elif dtype.itemsize == 2:
            rate = p.bf16
            if name in PRODUCTS:
                rate *= _share(read, p.half)
        elif "convolution" in name:
            rate = p.tf32
        self._cuda.stream_now().work(max(flops / rate, nbytes / p.memory) + p.kernel_s, name)


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    # Tensors that an operator writes in place.
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
