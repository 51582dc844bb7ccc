"""Counts the bytes that saved tensors hold, and checks them against the allocator's own counts.

Two independent counts, both the same for every mode:

* `SavedBytes` sees each tensor that autograd packs or unpacks, under any hooks of a mode. It
  follows the storage with a weak reference until the last owner drops it. Each storage counts
  once, at its full size. Further bytes that an engine holds are added.
* `heap_bytes` asks glibc how many bytes are allocated: by torch, numpy, Numba and Python alike,
  saved or not.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cswap import hook_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SAMPLE_S = 0.001  # a step takes some 40 ms; shorter waits would take the core from it


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes held in the course of one step: ``nbytes``, by sample."""

    nbytes: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Largest sample in bytes."""
        return max(self.nbytes, default=0)


@dataclass(frozen=True, slots=True)
class Held:
    """The bytes that an engine holds.

    Attributes:
        device_bytes: bytes of original and decoded tensors.
        host_bytes: bytes of encodings.
    """

    device_bytes: int = 0
    host_bytes: int = 0


class SavedBytes:
    """Live bytes of the storages that autograd saved, plus further bytes that an engine holds.

    Args:
        parameters: the model's tensors, which are not counted.
        inputs: saved tensors that outlive the step; they count only in `raw_bytes`.
        held: returns the bytes that the mode's engine holds now; called at each sample.

    Attributes:
        curve: bytes held over time.
        raw_bytes: bytes of all storages that were saved, each once; exact while none is freed.
    """

    def __init__(
        self, parameters: Iterable[Tensor], inputs: Iterable[Tensor], held: Callable[[], Held]
    ) -> None:
        self.curve = Curve()
        self.raw_bytes = 0
        self._outside = [*parameters, *inputs]  # held, so that their addresses are not reused
        self._inputs = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in inputs
        }
        self._owned = {x.untyped_storage().data_ptr() for x in self._outside}
        self._held = held
        self._live: dict[int, int] = {}  # address of the storage's C++ object -> its bytes
        # Reentrant, because a storage may die within a garbage collection that _note triggers. A
        # storage may also die on another thread that holds an engine's lock. So no code may call
        # an engine while it holds this lock: that could deadlock.
        self._lock = threading.RLock()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the tensors packed and unpacked in this block, inside the hooks already installed.

        autograd calls only the innermost pair of hooks, so this one passes every call on to the
        pair below it.
        """
        below = hook_stack.top(False)
        pack_below, unpack_below = below or (Tensor.detach, _same)

        def pack(x: Tensor) -> object:
            self._note(x)
            packed: object = pack_below(x)
            self._note_copies(packed)
            return packed

        def unpack(packed: Any) -> Tensor:
            x: Tensor = unpack_below(packed)
            self._note(x)
            return x

        with saved_tensors_hooks(pack, unpack):
            yield

    def _note(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage.data_ptr() in self._owned:
            self.raw_bytes += self._inputs.pop(storage.data_ptr(), 0)
            return
        if self._follow(storage):
            self.raw_bytes += storage.nbytes()
        self.sample()

    def _note_copies(self, packed: object) -> None:
        # save_on_cpu packs a device and its copy in host memory, which is device memory here
        for item in packed if isinstance(packed, tuple) else (packed,):
            if not isinstance(item, Tensor) or item.untyped_storage().data_ptr() in self._owned:
                continue
            if self._follow(item.untyped_storage()):
                self.sample()

    def _follow(self, storage: torch.UntypedStorage) -> bool:
        # Whether it is new; followed with a weak reference until its last owner drops it.
        with self._lock:
            key = storage._cdata  # noqa: SLF001 - data_ptr is 0 for every empty storage
            if key in self._live:
                return False
            self._live[key] = storage.nbytes()
            weakref.finalize(storage, self._forget, key).atexit = False
            return True

    def _forget(self, key: int) -> None:
        with self._lock:
            del self._live[key]

    def sample(self) -> None:
        """Record the bytes held now.

        The engine knows tensors that it decoded ahead and autograd has not asked for yet; the
        storages seen here include small ones, and those saved outside the model. The larger counts.
        """
        held = self._held()
        with self._lock:
            saved_bytes = max(sum(self._live.values()), held.device_bytes)
            self.curve.nbytes.append(saved_bytes + held.host_bytes)


def _same(x: Tensor) -> Tensor:
    return x


class _MallInfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap_bytes() -> int | None:
    """Bytes allocated with malloc and not freed, in all arenas and by mmap.

    None where the C library is not glibc >= 2.33.

    Source: mallinfo(3).
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _MallInfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


class HeapSampler:
    """Samples `heap_bytes` on a thread of its own while the block runs, as growth over a baseline.

    Args:
        baseline_bytes: the value of `heap_bytes` before the mode was switched on.
    """

    def __init__(self, baseline_bytes: int) -> None:
        self.curve = Curve()
        self._baseline_bytes = baseline_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heap-sampler", daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sample while the block runs, and once before and after it."""
        self.sample()
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
        self.sample()

    def sample(self) -> None:
        """Record the growth now; does nothing where the allocator cannot be asked."""
        now = heap_bytes()
        if now is not None:
            self.curve.nbytes.append(now - self._baseline_bytes)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.sample()
