"""A small engine for saved tensors: it keeps bytes, or computes them again."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cswap.remat.finder import Finder
from cswap.remat.reads import CLONE, Packed
from cswap.remat.record import Layout, Remat, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cswap.remat.record import Formula


class Held(Packed):
    """Bytes of a saved tensor, which are its own memory."""

    depth = tolerance = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("modified by an inplace operation")
        return self.tensor


class Again(Packed):
    """A saved tensor that is computed again, and, to compare with, a copy of its bytes."""

    tolerance = 0

    def __init__(self, remat: Remat, tensor: torch.Tensor) -> None:
        self.remat = remat
        self.depth = remat.formula.depth
        self.wanted = tensor.detach().clone(memory_format=torch.preserve_format)
        self.view = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.dtype = tensor.dtype
        self.unpacked = 0

    def unpack(self) -> torch.Tensor:
        self.unpacked += 1
        inputs = [packed.unpack() for packed in self.remat.inputs]  # type: ignore[attr-defined]
        before = [x.detach().clone() for x in inputs]
        whole = self.remat.run(inputs)
        assert Layout.of(whole) == self.remat.formula.layout
        assert not whole.storage_offset()
        assert not whole.requires_grad
        assert all(map(same_bits, inputs, before))  # inputs are only read
        out = whole.as_strided(*self.view)
        assert same_bits(out, self.wanted), self.remat.formula.operator
        return out


FORMULAS: Final[defaultdict[tuple[int, int, bool], deque[Formula]]] = defaultdict(
    lambda: deque(maxlen=8)
)
"""What was found last within the same limits, by this test and by others: every tensor is looked
for with each."""


def assert_same(a: Remat, b: Remat) -> None:
    """Two records have the same steps, numbers, and the very same inputs."""
    mine, its = a.formula, b.formula
    assert mine.steps == its.steps
    assert repr([step.constants for step in mine.steps]) == repr(
        [step.constants for step in its.steps]
    )  # 0.0 is not -0.0
    assert (mine.layout, mine.version, mine.root) == (its.layout, its.version, its.root)
    assert (mine.depth, mine.passes) == (its.depth, its.passes)
    assert all(x is y for x, y in zip(a.inputs, b.inputs, strict=True))
    for x, y in zip(a.constants, b.constants, strict=True):
        assert type(x) is type(y)
        if isinstance(x, torch.Tensor):
            assert isinstance(y, torch.Tensor)
            assert same_bits(x, y)
        else:
            assert repr(x) == repr(y)
    assert a.settings is b.settings


@dataclass
class Engine:
    """Packs saved tensors.

    Attributes:
        finder: None: it finds nothing.
        least_numel: tensors below this are held.
        owned: storages that outlive the step.
        saved: names of the operators of what was found; "-" of what was held, "shared" of what was
            saved before.
        packed: what autograd holds.
        again: what is computed again, by storage, version and layout.
        identities: keep a storage's number from being used for another one.
    """

    finder: Finder | None = None
    least_numel: int = 1
    owned: set[int] = field(default_factory=set)
    saved: list[str] = field(default_factory=list)
    packed: list[Held | Again] = field(default_factory=list)
    again: dict[tuple[object, ...], Again] = field(default_factory=dict)
    identities: list[StorageWeakRef] = field(default_factory=list)

    def pack(self, tensor: torch.Tensor) -> Held | Again:
        storage = tensor.untyped_storage()
        where = tensor.size(), tensor.stride(), tensor.storage_offset()
        key = (storage._cdata, tensor._version, *where)
        if key in self.again:
            self.saved.append("shared")
            return self.again[key]
        remat = None
        if self.finder is not None and tensor.numel() >= self.least_numel:
            remat = self.finder.find(tensor)
            self._find_with_formulas(tensor, remat)
        return self.pack_found(tensor, remat)

    def pack_found(self, tensor: torch.Tensor, remat: Remat | None) -> Held | Again:
        storage = tensor.untyped_storage()
        where = tensor.size(), tensor.stride(), tensor.storage_offset()
        key = (storage._cdata, tensor._version, *where)
        self.saved.append("-" if remat is None else remat.formula.operator)
        packed = Held(tensor) if remat is None else Again(remat, tensor)
        packed.is_clone = type(tensor.grad_fn).__name__ == CLONE
        self.packed.append(packed)
        if isinstance(packed, Again):
            self.again[key] = packed
            self.identities.append(StorageWeakRef(storage))
        return packed

    def _find_with_formulas(self, tensor: torch.Tensor, remat: Remat | None) -> None:
        # Whatever formula is expected, the result is the same; the right one is recognised.
        assert self.finder is not None
        limits = self.finder._limits
        products = limits.rows._products
        known = FORMULAS[limits.max_depth, limits.max_passes, products]
        if remat is not None:
            known.append(remat.formula)
        for formula in known:
            found = self.finder.find(tensor, formula)
            if remat is None:
                assert found is None
                continue
            assert found is not None
            assert_same(found, remat)
        if remat is not None:
            assert found is not None
            assert found.formula is remat.formula

    @property
    def found(self) -> list[str]:
        """Operators of the tensors that are computed again."""
        return [name for name in self.saved if name not in ("-", "shared")]

    @property
    def remats(self) -> list[Remat]:
        return [packed.remat for packed in self.packed if isinstance(packed, Again)]

    @property
    def held_bytes(self) -> int:
        """Bytes of the storages that are held and not owned, and of copies."""
        held = {
            packed.tensor.untyped_storage()._cdata: packed.tensor.untyped_storage().nbytes()
            for packed in self.packed
            if isinstance(packed, Held)
        }
        copies = sum(
            constant.nbytes
            for remat in self.remats
            for constant in remat.constants
            if isinstance(constant, torch.Tensor)
        )
        return copies + sum(nbytes for key, nbytes in held.items() if key not in self.owned)

    def forget(self) -> None:
        """Hold nothing; what autograd holds stays."""
        self.packed.clear()
        self.again.clear()

    def own(self, model: torch.nn.Module) -> None:
        tensors = (*model.parameters(), *model.buffers())
        self.owned = {t.untyped_storage()._cdata for t in tensors}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda p: p.unpack())


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """Makes an engine with a finder of these limits."""

    def make(**limits: Any) -> Engine:
        least_numel = limits.pop("least_numel", 1)
        return Engine(Finder(**limits), least_numel=least_numel)

    return make


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    """With the default limits."""
    return make_engine()


@pytest.fixture
def storing() -> Engine:
    """Holds everything."""
    return Engine()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
