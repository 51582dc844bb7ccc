"""Lossy codecs that did too much damage somewhere, and what comes next: less of it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from cswap.advisor.cost import RATIOS
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

_NEXT: Final = {"int4": "fp8", "fp8": "int8", "mxfp8": "int8", "int8": "bf16"}
"""After each lossy codec the next milder one, by `rules.RELATIVE_ERROR`. After all others:
lossless. Not from fp16 to bf16: the latter's error is the larger one."""

_HARSHEST_FIRST: Final = ("int4", "mxfp8", "fp8", "int8", "bf16", "fp16")

LOSSLESS: Final = "lossless"


def lossy_part(codec: str) -> str:
    """What makes a codec lossy: zeros that were left out before come back exactly.

    >>> lossy_part("zvc+int4"), lossy_part("int8")
    ('int4', 'int8')
    """
    return codec.rpartition("+")[2]


def next_milder(codec: str) -> str | None:
    """The codec with the next smaller error, composed alike; None: only a lossless one.

    >>> next_milder("zvc+int4"), next_milder("int8"), next_milder("bf16"), next_milder("zfp:8")
    ('zvc+fp8', 'bf16', None, None)
    """
    first, plus, last = codec.rpartition("+")
    after = _NEXT.get(last)
    return None if after is None else first + plus + after


def harshest(codecs: Iterable[str]) -> str:
    """The one of these lossy parts with the largest error; what is not known comes first."""
    return min(codecs, key=lambda c: _HARSHEST_FIRST.index(c) if c in _HARSHEST_FIRST else -1)


class Milder:
    """Which lossy codecs may no longer be used for which tensors. Only ever grows. Thread-safe.

    A class of tensors is the class of the module that saved them first, and their codec.
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
        """From now on modules of class ``kind`` use something milder than ``codec``.

        Returns:
            What the lossy part of it becomes: a name, or ``"lossless"``.
        """
        with self._lock:
            self._forbidden |= {(kind, lossy_part(codec))}
        after = next_milder(lossy_part(codec))
        while after is not None and not self.allows(kind, after):
            after = next_milder(after)
        return after or LOSSLESS

    def instead(self, codec: str, x: torch.Tensor, kind: str) -> str | None:
        """``codec`` where it is allowed, else the next milder one that is, and that takes x.

        Args:
            codec: the choice.
            x: the values.
            kind: class of the module that saves them.

        Returns:
            None if no lossy one is left.
        """
        name: str | None = codec
        while name is not None and not self.allows(kind, name):
            name = next_milder(name)
            while name is not None and not takes(get_codec(name), x.dtype, x.device.type):
                name = next_milder(name)
        return name

    def among(self, codecs: Iterable[str], x: torch.Tensor, kind: str) -> tuple[str, ...]:
        """These lossy candidates, each as it or its successor is allowed, if it can be priced."""
        if not self._forbidden:
            return tuple(codecs)
        found = [self.instead(codec, x, kind) for codec in codecs]
        return tuple(dict.fromkeys(name for name in found if name in RATIOS))
