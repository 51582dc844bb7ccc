"""Objects that can be taken off a model again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class Removable(Protocol):
    """Something that can be taken off again."""

    def remove(self) -> None:
        """Take it off; a second time does nothing."""
        ...


class RemovedAtExit(ABC):
    """A context manager that is taken off at the end of its ``with`` block, whatever ends it."""

    @abstractmethod
    def remove(self) -> None:
        """Take it off; a second time does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()
