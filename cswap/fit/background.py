"""One piece of work beside the training.

Note [a plan under way at exit]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A process that ends while the solver runs is aborted by C++ (SIGABRT), and its own exit status is
lost. So an exiting process waits for the thread, which is no daemon, and no further solver begins.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def is_ending() -> bool:
    """Whether the process ends, so that nothing long should begin."""
    return not threading.main_thread().is_alive()


class Background(Generic[T]):
    """Runs a function on a thread of its own."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Args: work: begins at once."""
        self._work, self._future = work, Future[T]()
        self._thread = threading.Thread(target=self._run, name="cswap-fit")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended. A fork has no thread: it has ended there, without a result."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """Its result; waits for that.

        Raises:
            Exception: the one that it raised.
        """
        self._thread.join()
        return self._future.result(timeout=0.0)

    def _run(self) -> None:
        try:
            self._future.set_result(self._work())
        except Exception as error:
            self._future.set_exception(error)
