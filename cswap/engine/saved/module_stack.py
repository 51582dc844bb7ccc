"""Where in the model the current thread is: set by module hooks, read at pack."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Scope:
    """Rules for the tensors saved in one module.

    Attributes:
        path: dotted name in the model, "" for the root or outside any.
        kind: class of the module.
        keep: why its saved tensors stay (``"excluded"``), or None.
        codec: forced by a glob of the ``codec`` option, or None.
        included: whether ``include`` selects the module; asked where it selects operators, too.
    """

    path: str = ""
    kind: str = ""
    keep: str | None = None
    codec: str | None = None
    included: bool = False


OUTSIDE: Final = Scope()


class ScopeStack(threading.local):
    """The modules that the current thread is in, outermost first, and the operator it runs.

    Attributes:
        stack: the modules.
        operator: name of the torch function; empty where nobody asks.

    A call of the model has a list of its own (see `ModelCall`), so that nothing of a call that was
    interrupted is left for the next one.
    """

    def __init__(self) -> None:
        self.stack: list[Scope] = [OUTSIDE]
        self.operator: str = ""

    @property
    def current(self) -> Scope:
        """The innermost module."""
        return self.stack[-1]
