"""Records a training step: all operators below autograd, all storages, all saved tensors."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cswap.plan.tracing import operators
from cswap.plan.tracing.positions import Positions, SavedRegion, byte_range
from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Use = tuple[int, int, int]
"""A part of a storage: key of the storage, first byte, bytes from the first to the last."""


class Timer(Protocol):
    """Measures the durations of operators."""

    def start(self) -> Any:
        """Called before an operator runs; returns its mark."""

    def stop(self, mark: Any) -> None:
        """Called after the operator has run."""


@dataclass(slots=True)
class RecordedStorage:
    """One storage of the step. Its address is not reused while the weak reference lives.

    Attributes:
        reference: reference to the storage object; it does not keep the memory alive.
        nbytes: size of the storage.
        name: a name for display.
        module: path of the module that produced the storage.
        dtype: dtype of the first tensor seen in the storage.
        shape: shape of that tensor, in elements.
        role: one of `cswap.schema.trace.ROLES`.
        writes: number of operators that have written to the storage since it was produced.
        regions: swappable parts of the storage that autograd saved.
        samples: for each region, the result of the sampler.
    """

    reference: StorageWeakRef
    nbytes: int
    name: str
    module: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    writes: int = 0
    regions: list[SavedRegion] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class RecordedOperator:
    """One operator as it ran; see `TraceOperator`.

    Attributes:
        name: torch's name of the operator.
        kind: one of `cswap.schema.trace.KINDS`.
        phase: forward, backward or optimizer.
        module: path of the module that called the operator, or whose backward contains it.
        dtype: dtype of its arithmetic.
        reads: parts of storages that it reads, without resident ones.
        produces: keys of the storages that it produces.
        writes: parts of storages that it changes in place, of those that it reads.
        flops: floating-point operations.
        bytes_moved: bytes read and written.
        mark: the timer's mark.
    """

    name: str
    kind: str
    phase: str
    module: str
    dtype: str
    reads: list[Use]
    produces: list[int]
    flops: float = 0.0
    bytes_moved: float = 0.0
    mark: Any = None
    writes: list[Use] = field(default_factory=list)


class Sampler(Protocol):
    """Reads the values of saved tensors."""

    def __call__(self, tensor: torch.Tensor, region: SavedRegion) -> Any:
        """Return a sample of a region that was just saved as this tensor."""


class Recorder(TorchDispatchMode):
    """A dispatch mode; enter it around forward, loss, backward and optimizer.

    Attributes:
        phase: phase of the operators that run now; the caller sets it.
        operators: recorded operators in execution order.
        storages: recorded storages by key, in order of appearance.
    """

    def __init__(
        self,
        owned: Iterable[torch.Tensor],
        *,
        min_bytes: int,
        timer: Timer | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """Args: owned: resident tensors, not in the trace."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.operators: list[RecordedOperator] = []
        self.storages: dict[int, RecordedStorage] = {}
        self._owned = {_key(t): StorageWeakRef(t.untyped_storage()) for t in owned}  # type: ignore[no-untyped-call]
        self._positions = Positions(min_bytes)
        self._timer = timer
        self._sampler = sampler
        self._modules: list[str] = [""]
        self._module_of_node: dict[int, str] = {}
        self._unpacked: list[Use] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and record it, unless it only makes a view or uninitialised memory."""
        kwargs = kwargs or {}
        name = func._opname  # noqa: SLF001
        if func.namespace == "prim" or func.is_view or name.startswith(("empty", "new_empty")):
            return func(*args, **kwargs)
        mark = None if self._timer is None else self._timer.start()
        out = func(*args, **kwargs)
        if self._timer is not None:
            self._timer.stop(mark)
        self._note(func, args, kwargs, out, mark)
        return out

    # ------------------------------------------------------------- the caller

    @property
    def n_saved(self) -> int:
        """Positions that saved tensors have so far."""
        return self._positions.count

    def name(self, tensor: torch.Tensor, name: str, role: str) -> None:
        """Set name and role of a tensor's storage; add the storage if it is missing."""
        if _key(tensor) not in self._owned:
            storage = self._storage(tensor, name)
            storage.name, storage.role = name, role

    def add(self, name: str, reads: Sequence[torch.Tensor], bytes_moved: float) -> None:
        """Record an operator that was not run, such as a fused optimizer."""
        dtype = operators.compute_dtype(reads)
        uses = self._uses(reads)
        self.operators.append(
            RecordedOperator(name, self.phase, self.phase, "", dtype, uses, [], 0.0, bytes_moved)
        )

    @contextmanager
    def paths(self, model: torch.nn.Module) -> Iterator[None]:
        """A context in which the recorder knows the module that each operator runs in."""

        def enter(path: str) -> Any:
            return lambda _module, _args: self._modules.append(path)

        def leave(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
            self._modules.pop()

        handles = []
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path), prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which saved tensors get positions, as under an installed engine."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    # ------------------------------------------------------------------ hooks

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Use | None]:
        kept = tensor if tensor.is_leaf else tensor.detach()
        if _key(tensor) in self._owned or not tensor.untyped_storage().nbytes():
            return kept, None
        storage = self._storage(tensor, "saved")
        if self.phase == "forward" and self._positions.add(tensor, storage.regions, storage.writes):
            region = storage.regions[-1]
            storage.samples.append(None if self._sampler is None else self._sampler(kept, region))
        return kept, (_key(tensor), *byte_range(tensor))

    def _unpack(self, packed: tuple[torch.Tensor, Use | None]) -> torch.Tensor:
        kept, use = packed
        if use is not None:
            # The node's next operator is taken as the reader. If it does not read the tensor, the
            # tensor was still held until then.
            self._unpacked.append(use)
        return kept

    # -------------------------------------------------------------- operators

    def _note(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, mark: Any
    ) -> None:
        read, results = operators.tensors_in((args, kwargs)), operators.tensors_in(out)
        mutated = operators.tensors_in(
            [
                args[place] if place < len(args) else kwargs.get(name)
                for place, name in operators.mutated_arguments(func)
            ]
        )
        known = {_key(t) for t in read}
        fresh = {_key(t): t for t in results if _key(t) not in known}
        if results and not fresh and not mutated:
            return  # a view that is not marked as one
        # Uninitialised memory is produced by the first operator that writes to it.
        born = {_key(t): t for t in mutated if self._is_new(t)} | fresh
        module = self._current_module()
        operator = RecordedOperator(
            name=func._opname,  # noqa: SLF001
            kind="optimizer" if self.phase == "optimizer" else operators.kind_of(func),
            phase=self.phase,
            module=module,
            dtype=operators.compute_dtype([*read, *results]),
            reads=self._uses([t for t in read if _key(t) not in born]),
            produces=[],
            flops=operators.flops_of(func, args, kwargs, out),
            bytes_moved=operators.bytes_moved(func, read, mutated, list(fresh.values())),
            mark=mark,
            writes=self._uses([t for t in mutated if _key(t) not in born]),
        )
        for tensor in born.values():
            if self._is_new(tensor) and tensor.untyped_storage().nbytes():
                self._storage(tensor, operator.name)
                operator.produces.append(_key(tensor))
        for key in {_key(t) for t in mutated} - born.keys() - self._owned.keys():
            self.storages[key].writes += 1
        operator.reads += [u for u in self._unpacked if u not in operator.reads]
        self._unpacked.clear()
        self.operators.append(operator)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        key = _key(tensor)
        return key not in self._owned and key not in self.storages

    def _uses(self, tensors: Sequence[torch.Tensor]) -> list[Use]:
        uses: dict[Use, None] = {}
        for tensor in tensors:
            if _key(tensor) in self._owned or not tensor.untyped_storage().nbytes():
                continue
            if tensor.numel():
                self._storage(tensor, "input")
                uses[(_key(tensor), *byte_range(tensor))] = None
        return list(uses)

    def _storage(self, tensor: torch.Tensor, name: str) -> RecordedStorage:
        key = _key(tensor)
        found = self.storages.get(key)
        if found is None:
            roles = {"forward": "activation", "backward": "gradient", "optimizer": "optimizer"}
            module = self._current_module()
            storage = tensor.untyped_storage()
            found = self.storages[key] = RecordedStorage(
                reference=StorageWeakRef(storage),  # type: ignore[no-untyped-call]
                nbytes=storage.nbytes(),
                name=f"{module}.{name}" if module else name,
                module=module,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                role=roles[self.phase],
            )
        return found

    def _current_module(self) -> str:
        if self.phase == "forward":
            # Autograd numbers an operator's node, if it has one, just before the operator runs.
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]  # noqa: SLF001
            self._module_of_node[number] = self._modules[-1]
            return self._modules[-1]
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001 - None outside of a node
        return "" if node is None else self._module_of_node.get(node._sequence_nr(), "")  # noqa: SLF001


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001
