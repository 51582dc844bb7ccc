"""`Recent`: a table of bounded size, which forgets the entries that nobody has asked for lately.

Whatever is remembered by shape, size or position grows with every new sequence length of the data.
Entries are in two dicts, a young one and an old one. One that is found in the old one moves to the
young one; when that is half of the table, it becomes the old one, and the last old one is
forgotten. So an entry that is asked for again and again stays, and to find it takes one look-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

K = TypeVar("K")
V = TypeVar("V")

CLASSES: Final = 4
"""Size classes per power of two, see `rough_size`."""


class Recent(Generic[K, V]):
    """The entries used last, by key; no value is None.

    Threads that write at the same time may make it forget entries, and nothing else.
    """

    __slots__ = ("_half", "_old", "_young")

    def __init__(self, most: int) -> None:
        """Make an empty table.

        Args:
            most: entries that it holds at most. Half of them are never forgotten if they are used
                in turns.
        """
        self._half = max(1, most // 2)
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """The value of a key; None: there is none, or it was forgotten."""
        found = self._young.get(key)
        if found is None and self._old:
            found = self._old.pop(key, None)
            if found is not None:
                self[key] = found
        return found

    def __setitem__(self, key: K, value: V) -> None:
        young = self._young
        if len(young) >= self._half and key not in young:
            self._old = young
            self._young = young = {}
        young[key] = value
        self._old.pop(key, None)

    def pop(self, key: K) -> V | None:
        """Take an entry out; its value, or None."""
        found, old = self._young.pop(key, None), self._old.pop(key, None)
        return old if found is None else found

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __iter__(self) -> Iterator[K]:
        yield from [*self._old, *self._young]

    def values(self) -> list[V]:
        """All values, those that are forgotten next first."""
        return [*self._old.values(), *self._young.values()]

    def clear(self) -> None:
        """Forget all."""
        self._old, self._young = {}, {}


def rough_size(n: int) -> int:
    """The size class of a number, for that which is as good as the same for sizes close by.

    >>> [rough_size(n) for n in (7, 100, 111, 112, 1024, 1279, 1280)]
    [7, 96, 96, 112, 1024, 1024, 1280]
    """
    bits = max(0, n.bit_length() - CLASSES.bit_length())
    return n >> bits << bits
