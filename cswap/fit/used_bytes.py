"""Bytes that autograd holds besides the engine's: `UsedBytes`."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from cswap import hook_stack
from cswap.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cswap.stats.counters import Counters


class _Storage(weakref.ref[torch.UntypedStorage]):
    """Notices when a storage goes. Its callback is a deque's ``append``, as in reclaim.py."""

    __slots__ = ("name", "nbytes")

    name: int
    nbytes: int


class UsedBytes:
    """Counts bytes that no engine knows of: of second forwards, and in use by autograd now.

    A storage may go while somebody holds the counters' lock, within a collection of garbage. So
    its bytes are only written down then.

    Attributes:
        on_gone: told the name of each storage that is gone.
        most_bytes: of a second forward.
    """

    def __init__(self, counters: Counters) -> None:
        """Args: counters: of the engine."""
        self.on_gone: Callable[[int], object] = lambda _: None
        self.most_bytes = 0
        self._counters = counters
        self._gone: deque[weakref.ref[torch.UntypedStorage]] = deque()
        self._known: dict[int, _Storage] = {}

    def add(self, storage: torch.UntypedStorage) -> int:
        """Count a storage for as long as it lives, a second time not; its name until then."""
        if self._gone:
            self.settle()
        name: int = storage._cdata  # noqa: SLF001 - data_ptr is 0 for every empty storage
        if name not in self._known:
            known = self._known[name] = _Storage(storage, self._gone.append)
            known.name, known.nbytes = name, storage.nbytes()
            self._counters.use(known.nbytes)
        return name

    @contextmanager
    def counted(self, module: torch.nn.Module) -> Iterator[None]:
        """Around a module's second forward: torch holds the tensors that it saves.

        Args:
            module: whose parameters and buffers do not count.
        """
        below = hook_stack.top(False)
        if below is None:
            yield
            return
        outside = (*module.parameters(), *module.buffers())
        plain = (torch.Tensor, torch.nn.Parameter)
        known = {x.untyped_storage().data_ptr() for x in outside if type(x) in plain}
        pack_below, unpack_below = below
        nbytes = 0

        def pack(x: torch.Tensor) -> Any:
            nonlocal nbytes
            storage = storage_of(x)
            if storage is not None and storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                nbytes += storage.nbytes()
                self.add(storage)
            return pack_below(x)

        try:
            with saved_tensors_hooks(pack, unpack_below):
                yield
        finally:  # torch ends it by an exception once all is there that is needed
            self.most_bytes = max(self.most_bytes, nbytes)

    def forget(self) -> None:
        """Count none any more: nobody settles them from here on."""
        known, self._known = self._known, {}
        self._gone.clear()
        self._counters.use(-sum(one.nbytes for one in known.values()))

    def settle(self) -> None:
        """Take off those that are gone."""
        while self._gone:
            gone = self._gone.popleft()
            if not isinstance(gone, _Storage):
                raise InternalError(f"{gone!r} is no reference to a storage")
            if self._known.get(gone.name) is gone:
                del self._known[gone.name]
                self.on_gone(gone.name)
                self._counters.use(-gone.nbytes)


def storage_of(x: object) -> torch.UntypedStorage | None:
    """None: no plain tensor, or one that stands for another, inside of vmap or jvp."""
    if type(x) is not torch.Tensor or x.layout is not torch.strided:
        return None
    try:
        return x.untyped_storage()
    except RuntimeError:
        return None
