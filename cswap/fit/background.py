"""One piece of work beside the training.

Note [a plan under way at exit]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A process that ends while the solver runs is aborted by C++ (SIGABRT), and its own exit status is
lost. So an exiting process waits for the solver, and no further solver begins.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

END_S: Final = 60.0
"""How long an exiting process waits: as long as the solver searches at the most."""

_running: weakref.WeakSet[Background[Any]] = weakref.WeakSet()
_ending = threading.Event()


def is_ending() -> bool:
    """Whether the process ends, so that nothing long should begin."""
    return _ending.is_set()


class Background(Generic[T]):
    """Runs a function on a thread of its own, which does not keep the process alive."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Args: work: begins at once."""
        self._work = work
        self._result: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="cswap-fit", daemon=True)
        _running.add(self)
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

    def end(self) -> None:
        """Wait for it at the process's end."""
        self._thread.join(END_S)

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error


@atexit.register
def _end() -> None:
    _ending.set()
    for one in tuple(_running):
        one.end()
