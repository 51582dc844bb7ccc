"""One piece of work beside the training."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Background(Generic[T]):
    """Runs a function on a thread of its own, which does not keep the process alive."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Args: work: begins at once."""
        self._work = work
        self._result: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="cswap-fit", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Its result; waits for that.

        Raises:
            Exception: the one that it raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None  # or it would have raised
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
