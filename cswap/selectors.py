"""Selectors, as ``exclude`` takes them: module classes, globs on module paths, and operators.

A path without wildcards is looked up, whatever the number of such paths. Globs with wildcards are
compiled once and tried one by one, so their number and length are bounded.
"""

from __future__ import annotations

import re
from fnmatch import translate
from typing import TYPE_CHECKING, Final, TypeGuard

from cswap.display import shown
from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

MOST_GLOBS: Final = 2000
"""With wildcards, in one option: one module costs less than a millisecond."""

MOST_LENGTH: Final = 500
"""Characters of one glob. Compiling takes time that grows with the square of the length."""

MOST_CHARACTERS: Final = 50_000
"""Of all globs of an option together."""

MOST_LOOKS: Final = 200_000
"""Pairs of a glob and a path that `unmatched` looks at."""

_WILD: Final = re.compile(r"[*?\[]")

OPERATOR: Final = "op:"
"""Begins a glob on names of operators (cswap/engine/saved/operators.py)."""

_NODE: Final = re.compile(r"Backward\d*$")
_WORD: Final = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])")


def operator_name(name: str) -> str:
    """The name by which selectors know an operator.

    Args:
        name: of a function of torch, or of an autograd node.

    >>> [operator_name(x) for x in ("SoftmaxBackward0", "relu_", "__getitem__", "mm.default")]
    ['softmax', 'relu', 'getitem', 'mm']
    >>> operator_name("MaxPool2DWithIndicesBackward0")
    'max_pool2d_with_indices'
    """
    words = _WORD.sub("_", _NODE.sub("", name.partition(".")[0]))
    return words.strip("_").lower()


def of_operators(selectors: Iterable[object]) -> list[str]:
    """The globs on names of operators among selectors, in their order; without ``op:``.

    >>> of_operators(["op:Scaled*", "head", "op:AddmmBackward0"])
    ['scaled*', 'addmm']
    """
    globs = [s.removeprefix(OPERATOR) for s in selectors if _is_of_operators(s)]
    return [glob.lower() if _WILD.search(glob) else operator_name(glob) for glob in globs]


def of_modules(selectors: Iterable[str | type]) -> list[str | type]:
    """The other selectors, in their order."""
    return [s for s in selectors if not _is_of_operators(s)]


def _is_of_operators(selector: object) -> TypeGuard[str]:
    return isinstance(selector, str) and selector.startswith(OPERATOR)


def check_globs(globs: Iterable[str], name: str) -> None:
    """Refuse globs that would take too long.

    Args:
        globs: on module paths; those without wildcards are free.
        name: of the option, for messages.

    Raises:
        ConfigError: one is too long, or there are too many.
    """
    wild = [glob for glob in globs if _WILD.search(glob)]
    for glob in wild:
        if len(glob) > MOST_LENGTH:
            raise ConfigError(
                f"{name}={shown(glob)}: has {len(glob)} characters; a glob may have {MOST_LENGTH}."
            )
    if len(wild) > MOST_GLOBS or sum(map(len, wild)) > MOST_CHARACTERS:
        raise ConfigError(
            f"{name}: has {len(wild)} globs; there may be {MOST_GLOBS} of {MOST_CHARACTERS} "
            "characters together. Use fewer wildcards: paths without them are not limited."
        )


class Globs:
    """Globs in their order, to be asked for the first that matches a path.

    >>> Globs(["head", "layer.*", "layer.7"]).first("layer.7")
    'layer.*'
    """

    def __init__(self, globs: Iterable[str]) -> None:
        self._plain: dict[str, int] = {}
        self._wild: list[tuple[int, str, re.Pattern[str]]] = []
        for place, glob in enumerate(dict.fromkeys(globs)):
            if _WILD.search(glob):
                self._wild.append((place, glob, re.compile(translate(glob))))
            else:
                self._plain[glob] = place

    def first(self, path: str) -> str | None:
        """The first glob that matches the path; None if none does."""
        plain = self._plain.get(path)
        for place, glob, pattern in self._wild:
            if plain is not None and plain < place:
                break
            if pattern.match(path):
                return glob
        return None if plain is None else path


def unmatched(globs: Iterable[str], paths: Collection[str]) -> list[str]:
    """The globs that match no path, in their order; empty where finding out would take long.

    >>> unmatched(["head", "lay*", "layers.[0-9]"], ["", "head", "layers.3"])
    []
    >>> unmatched(["heads", "lay?"], ["", "head", "layers.3"])
    ['heads', 'lay?']
    """
    found = [glob for glob in dict.fromkeys(globs) if glob not in paths]
    wild = sum(1 for glob in found if _WILD.search(glob))
    if wild * len(paths) > MOST_LOOKS:
        return []
    return [glob for glob in found if not _matches_any(glob, paths)]


def _matches_any(glob: str, paths: Iterable[str]) -> bool:
    if not _WILD.search(glob):
        return False  # it is none of them
    pattern = re.compile(translate(glob))
    return any(pattern.match(path) for path in paths)


class Selectors:
    """Classes and globs; true if there are any.

    >>> chosen = Selectors((int, "head.*"))
    >>> chosen.matches("body", 1), chosen.matches("head.0", ""), chosen.matches("head", "")
    (True, True, False)
    """

    def __init__(self, selectors: Collection[str | type]) -> None:
        self._types = tuple(s for s in selectors if isinstance(s, type))
        self._globs = Globs(s for s in selectors if isinstance(s, str))
        self._any = bool(selectors)

    def __bool__(self) -> bool:
        return self._any

    def matches(self, path: str, module: object) -> bool:
        """Whether one of them selects this module."""
        return isinstance(module, self._types) or self._globs.first(path) is not None
