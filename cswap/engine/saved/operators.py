"""Selectors of operators in the options: ``exclude=["op:softmax"]`` (`OperatorRules`).

Note [the operator that saves a tensor]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``op:`` selects the tensors that an operator saves for its own backward: inputs of gelu, the result
of softmax. The hook that gets a tensor is not told who saves it. Two things are known. While the
recorder of torch functions is on (`OperatorRecorder`), the function that the user's code has called
is: ``linear``, ``softmax``, but ``multi_head_attention_forward`` for all that happens inside of
that. And a result has its autograd node when the node saves it, ``SoftmaxBackward0``, wherever that
was called (`Role.is_result`). A tensor matches by either name. So an input that is saved inside of
a function that torch has written in Python goes by that function's name alone. Inputs of nodes that
no torch function makes, of custom autograd Functions and compiled graphs, go by no name.

Note [several operators save the same memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Softmax saves its result, and the product after it the same tensor as its input. The first of them
decides about ``codec``. Memory that one of them excludes stays for all of them: an
encoding would come on top of it. Memory that one of them includes may leave. So a tensor that stays
by one of these rules has a handle, which the others find. If the excluded one is not the first, and
the first has left, both are held in this step; from the next one on, the first one stays, too. If
an included one is not the first, the memory leaves when that saves it. Goals and plans decide about
each tensor when it is saved first, so there it stays.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from cswap.display import MOST_SHOWN, short, shown
from cswap.log import log
from cswap.selectors import OPERATOR, Globs, of_operators, operator_name, unmatched

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.config import SwapConfig
    from cswap.engine.recipe import Role
    from cswap.engine.saved.module_stack import Scope

EXCLUDED: Final = "excluded"
"""Reason of tensors that stay by a selector (`cswap.stats.keep_reasons`)."""

LEFT_OUT: Final = "left out"
"""The same, until an operator that is included saves that memory, too."""

MOST_NAMES: Final = 500
"""Names of operators that are remembered until the first step is over."""

MOST_TOLD: Final = 30
"""Of these, those that the log names."""


class OperatorRules:
    """The operators that the options select; true if there are any."""

    def __init__(self, config: SwapConfig) -> None:
        """Args: config: the engine's."""
        codecs = config.codec if isinstance(config.codec, dict) else {}
        self._codecs: dict[str, str] = {}
        for key, name in codecs.items():
            for glob in of_operators([key]):
                self._codecs.setdefault(glob, name)  # relu_ is relu
        self._order = {glob: n for n, glob in enumerate(self._codecs)}
        globs = {
            "exclude": of_operators(config.exclude),
            "include": of_operators(config.include),
            "codec": list(self._codecs),
        }
        self._globs = globs
        self._exclude, self._include, self._codec = (Globs(found) for found in globs.values())
        self._any = any(globs.values())
        self._seen: set[str] | None = set() if self._any else None  # None: it has been told

    def __bool__(self) -> bool:
        return self._any

    def of(self, role: Role, scope: Scope) -> tuple[str | None, str]:
        """The rules of the options for a tensor that is saved in a module.

        Returns:
            The name of its codec, or None; and `EXCLUDED` or `LEFT_OUT`, if it stays by a selector
            of operators.
        """
        if not self._any:
            return scope.codec, ""
        saved_by = names_of(role)
        seen = self._seen
        if seen is not None and len(seen) < MOST_NAMES:
            seen.update(saved_by)
        stays = ""
        if _matches(self._exclude, saved_by):
            stays = EXCLUDED
        elif self._globs["include"] and not (scope.included or _matches(self._include, saved_by)):
            stays = LEFT_OUT
        found = [glob for name in saved_by if (glob := self._codec.first(name)) is not None]
        if not found:
            return scope.codec, stays
        return self._codecs[min(found, key=self._order.__getitem__)], stays

    def tell(self) -> None:
        """A step is over. After the first one, log the selectors that match nothing."""
        if self._seen is None:
            return
        seen, self._seen = self._seen.copy(), None  # another thread may add to it
        for option, globs in self._globs.items():
            for glob in unmatched(globs, seen):
                log.warning(
                    "%s=%s: no such operator has saved a tensor of min_bytes or more in the first "
                    "step.%s Operators that have: %s.",
                    *(option, shown(OPERATOR + glob), _hint(glob, seen), _listed(seen)),
                )


def names_of(role: Role) -> tuple[str, ...]:
    """The names of the operator that saves a tensor; see the Note."""
    names = [role.operator] if role.operator else []
    return tuple(map(operator_name, [*names, role.producer] if role.is_result else names))


def _matches(globs: Globs, names: Iterable[str]) -> bool:
    return any(globs.first(name) is not None for name in names)


def _hint(glob: str, seen: Iterable[str]) -> str:
    close = difflib.get_close_matches(glob[:MOST_SHOWN], seen, n=1)
    return f" Did you mean {shown(OPERATOR + close[0])}?" if close else ""


def _listed(seen: Iterable[str]) -> str:
    names = sorted(seen)
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return ", ".join(map(short, names[:MOST_TOLD])) + more or "none"
