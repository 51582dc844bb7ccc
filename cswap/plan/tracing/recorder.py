"""Records a training step: every operator below autograd, every storage, every saved tensor."""

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
"""A part of a storage: its key, first byte, bytes from the first to the last."""


class Timer(Protocol):
    """Measures how long operators take."""

    def start(self) -> Any:
        """Before an operator is run; returns its mark."""

    def stop(self, mark: Any) -> None:
        """After it has been run."""


@dataclass(slots=True)
class RecordedStorage:
    """One storage of the step. Its address is not reused while the weak reference lives.

    Attributes:
        reference: to the storage, not to its memory.
        nbytes: its size.
        name: for people.
        module: path of the module that produced it.
        dtype: of the first tensor seen in it, as are its sizes.
        shape: in elements.
        role: one of `cswap.schema.trace.ROLES`.
        writes: how often an operator has written to it since it was produced.
        regions: what autograd saved of it, if that could be swapped.
        samples: of each region, what a sampler made of its values.
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
        name: torch's name of it.
        kind: one of `cswap.schema.trace.KINDS`.
        phase: forward, backward or optimizer.
        module: path of the module that called it, or whose backward it is part of.
        dtype: what its arithmetic is done in.
        reads: what it reads, without what is resident.
        produces: keys of the storages that it produces.
        flops: floating-point operations.
        bytes_moved: bytes read and written.
        workspace_bytes: device memory held meanwhile.
        mark: the timer's.
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
    workspace_bytes: int = 0
    mark: Any = None


class Sampler(Protocol):
    """Looks at the values of saved tensors."""

    def __call__(self, tensor: torch.Tensor, region: SavedRegion) -> Any:
        """What there is to say of a region, just saved as this tensor."""


class Recorder(TorchDispatchMode):
    """A dispatch mode; enter it around forward, loss, backward and optimizer.

    Attributes:
        phase: of the operators that run now; to be set by the caller.
        operators: in execution order.
        storages: by key, in order of appearance.
    """

    def __init__(
        self,
        owned: Iterable[torch.Tensor],
        *,
        parameters: Iterable[tuple[str, torch.Tensor]] = (),
        min_bytes: int,
        workspace: operators.Workspace = "none",
        timer: Timer | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """Args: owned: resident, not part of the trace; parameters: part of it, by name."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.operators: list[RecordedOperator] = []
        self.storages: dict[int, RecordedStorage] = {}
        self._owned = {_key(t): StorageWeakRef(t.untyped_storage()) for t in owned}  # type: ignore[no-untyped-call]
        self._positions = Positions(min_bytes)
        self._workspace: operators.Workspace = workspace
        self._timer = timer
        self._sampler = sampler
        self._modules: list[str] = [""]
        self._module_of_node: dict[int, str] = {}
        self._unpacked: list[Use] = []
        for name, parameter in parameters:
            self.name(parameter, name, "parameter")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and note it, unless it only makes a view or uninitialised memory."""
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

    def name(self, tensor: torch.Tensor, name: str, role: str) -> None:
        """Say what the storage of a tensor is; it becomes part of the trace if it is not yet."""
        if _key(tensor) not in self._owned:
            storage = self._storage(tensor, name)
            storage.name, storage.role = name, role

    def add(self, name: str, reads: Sequence[torch.Tensor], bytes_moved: float) -> None:
        """Note an operator that has not been run, such as a fused optimizer."""
        dtype = operators.compute_dtype(reads)
        uses = self._uses(reads)
        self.operators.append(
            RecordedOperator(name, self.phase, self.phase, "", dtype, uses, [], 0.0, bytes_moved)
        )

    @contextmanager
    def paths(self, model: torch.nn.Module) -> Iterator[None]:
        """Meanwhile operators know in which module of the model they run."""

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
        """Meanwhile saved tensors have positions, as while an installed model runs forward."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    # ------------------------------------------------------------------ hooks

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Use | None]:
        kept = tensor if tensor.is_leaf else tensor.detach()
        if _key(tensor) in self._owned or not tensor.untyped_storage().nbytes():
            return kept, None
        storage = self._storage(tensor, "saved")
        if storage.role == "parameter":
            return kept, (_key(tensor), *byte_range(tensor))
        if self.phase == "forward" and self._positions.add(tensor, storage.regions, storage.writes):
            region = storage.regions[-1]
            storage.samples.append(None if self._sampler is None else self._sampler(kept, region))
        return kept, (_key(tensor), *byte_range(tensor))

    def _unpack(self, packed: tuple[torch.Tensor, Use | None]) -> torch.Tensor:
        kept, use = packed
        if use is not None:
            # The node uses it in its next operator; if that does without, it was held till then.
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
            return  # a view that does not say so
        # What was made without values is produced by the first operator that writes to it.
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
            workspace_bytes=operators.workspace_of(func, args, self._workspace),
            mark=mark,
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
            # An operator's node, if it has one, was numbered just before the operator runs.
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]  # noqa: SLF001
            self._module_of_node[number] = self._modules[-1]
            return self._modules[-1]
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001 - None outside of a node
        return "" if node is None else self._module_of_node.get(node._sequence_nr(), "")  # noqa: SLF001


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001
