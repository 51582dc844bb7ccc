"""Milder codecs in place of lossy ones that have harmed gradients.

Note [the ladder]
~~~~~~~~~~~~~~~~~
The codecs' own relative errors order them (`CodecTraits.relative_error`). Below a codec stands the
one with the largest error that is at most `MILDER` of its own. Among codecs whose errors are within
`ALIKE` of that one, the smallest error wins. A codec may also name its successor itself
(`CodecTraits.milder`). Built-in: int4 → fp8 → int8 → bf16 → lossless, and mxfp8 → int8. A codec of
unknown error goes to lossless at once.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from cswap.advisor.candidates import relative_error
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec, installed_codecs
from cswap.codecs.traits import LOSSLESS
from cswap.errors import ConfigError
from cswap.log import log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

MILDER: Final = 0.5
"""Largest share of a codec's error that a milder codec may have."""

ALIKE: Final = 0.8
"""Errors whose quotient is at least this count as alike."""


def lossy_part(codec: str) -> str:
    """The part of a codec's name that makes it lossy: ``zvc+`` in front leaves zeros exact.

    >>> lossy_part("zvc+int4"), lossy_part("int8")
    ('int4', 'int8')
    """
    return codec.rpartition("+")[2]


def next_milder(codec: str) -> str | None:
    """The codec below this one in the ladder, composed alike if possible; None: lossless.

    >>> next_milder("zvc+int4"), next_milder("int8"), next_milder("bf16"), next_milder("zfp:8")
    ('zvc+fp8', 'bf16', None, None)
    """
    first, plus, last = codec.rpartition("+")
    traits = get_codec(last).traits
    after = traits.milder or _next_by_error(traits.relative_error)
    if after is None or after == LOSSLESS:
        return None
    return _made(first + plus + after) or _made(after)  # not every codec can follow zvc


def milder_codecs(codec: str) -> Iterator[str]:
    """The codecs below this one in the ladder, from the next one down, each once."""
    seen = {codec}  # codecs that name each other as milder would go round for ever
    after = next_milder(codec)
    while after is not None and after not in seen:
        yield after
        seen.add(after)
        after = next_milder(after)


def _next_by_error(error: float | None) -> str | None:
    if error is None:
        return None
    errors = {codec.name: relative_error(codec) for codec in installed_codecs()}
    milder = {name: e for name, e in errors.items() if e <= MILDER * error}
    most = max(milder.values(), default=0.0)
    alike = [name for name, e in milder.items() if e >= ALIKE * most]
    return min(alike, key=milder.__getitem__, default=None)


def harshest(codecs: Iterable[str]) -> str:
    """The codec with the largest relative error; an unknown error counts as the largest."""
    return max(codecs, key=lambda codec: relative_error(get_codec(codec)))


def _made(codec: str) -> str | None:
    try:
        return get_codec(codec).name
    except ConfigError as error:
        log.debug("%s is no successor of a lossy codec: %s", codec, error)
        return None


class Milder:
    """The lossy codecs that classes of tensors may no longer use. Only grows. Thread-safe.

    A class of tensors: those with the same codec, first saved in modules of the same class.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forbidden: frozenset[tuple[str, str]] = frozenset()  # replaced, never changed

    def allows(self, kind: str, codec: str) -> bool:
        """Whether modules of class ``kind`` may still use this codec."""
        if not self._forbidden:
            return True
        return (kind, lossy_part(codec)) not in self._forbidden

    def forbid(self, kind: str, codec: str) -> str:
        """Make modules of class ``kind`` use a milder codec than ``codec`` from now on.

        Returns:
            The name that replaces its lossy part, or ``"lossless"``.
        """
        with self._lock:
            self._forbidden |= {(kind, lossy_part(codec))}
        allowed = (n for n in milder_codecs(lossy_part(codec)) if self.allows(kind, n))
        return next(allowed, LOSSLESS)

    def instead(self, codec: str, x: torch.Tensor, kind: str) -> str | None:
        """``codec`` where it is allowed, else the next milder codec that is allowed and takes x.

        Args:
            codec: the choice.
            x: the values.
            kind: class of the module that saves them.

        Returns:
            None if no lossy codec is left.
        """
        if self.allows(kind, codec):
            return codec
        for name in milder_codecs(codec):
            if self.allows(kind, name) and takes(get_codec(name), x.dtype, x.device.type):
                return name
        return None

    def among(self, codecs: Iterable[str], x: torch.Tensor, kind: str) -> tuple[str, ...]:
        """These lossy candidates with forbidden ones replaced, each once, if they can be priced."""
        if not self._forbidden:
            return tuple(codecs)
        found = dict.fromkeys(self.instead(codec, x, kind) for codec in codecs)
        return tuple(name for name in found if name is not None and _is_priced(name))


def _is_priced(codec: str) -> bool:
    return get_codec(codec).traits.predicted_ratio is not None
