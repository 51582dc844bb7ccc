"""Compares the gradients of one module call: lossy saved tensors against exact ones."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from cswap.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.engine.saved.observer import Saved
    from cswap.guard.module_rerun import Call

REPEATABLE: Final = 1e-3
"""The outputs of the two forwards count as the same up to this relative difference."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How much the lossy saved tensors changed the gradients.

    Attributes:
        error: relative error of all gradients of the module, taken as one vector; infinite if a
            lossy gradient is not finite although the exact gradient is.
        cosine: cosine of the angle between the exact and the lossy gradients; NaN if the error is
            infinite.
        codecs: pairs of a module class and the lossy codec of a tensor that it saved first.
    """

    error: float
    cosine: float
    codecs: frozenset[tuple[str, str]]


def compare(call: Call, saved: Iterable[Saved]) -> Verdict | None:
    """Run a call exactly and lossily, and compare the gradients.

    Args:
        call: a recorded call, with the gradients of its outputs.
        saved: the tensors that the call saved, in order.

    Returns:
        None if no comparison is possible: no lossy codec took part, or the exact gradients are
        zero or not finite.

    Raises:
        UnsupportedError: the outputs of the two runs differ.
    """
    lossy = _Lossy(saved)
    exact_run, lossy_run = call.run(_as_it_is), call.run(lossy)
    if not lossy.used:
        return None
    if _distance(exact_run.outputs, lossy_run.outputs).error > REPEATABLE:
        raise UnsupportedError("the same call gives another result")
    found = _distance(exact_run.gradients, lossy_run.gradients)
    if not math.isfinite(found.exact) or found.exact == 0:
        return None
    return Verdict(found.error, found.cosine, frozenset(lossy.used))


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class _Lossy:
    """A pack hook: encodes and decodes each saved tensor with the codec that the engine chose."""

    def __init__(self, saved: Iterable[Saved]) -> None:
        self._expected: defaultdict[tuple[torch.dtype, torch.Size], deque[Saved]] = defaultdict(
            deque
        )
        for s in saved:
            self._expected[s.dtype, s.sizes].append(s)
        self.used: set[tuple[str, str]] = set()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        waiting = self._expected.get((x.dtype, x.shape))
        found = waiting.popleft() if waiting else None
        handle = None if found is None else found.lossy()
        if handle is None or handle.codec is None:
            return x
        codec, site = handle.codec, handle.site
        with torch.no_grad():
            plain = x.detach().resolve_conj().resolve_neg()
            decoded = codec.decode(codec.encode(plain))
        self.used.add(("" if site is None else site.kind, codec.name))
        return decoded


@dataclass(frozen=True, slots=True)
class _Distance:
    """The norms of two lists of tensors and of their difference; each list is one long vector."""

    exact: float
    lossy: float
    difference: float

    @property
    def error(self) -> float:
        if not math.isfinite(self.exact):
            return 0.0
        if not math.isfinite(self.difference):
            return math.inf
        if self.exact == 0:
            return math.inf if self.difference else 0.0
        return self.difference / self.exact

    @property
    def cosine(self) -> float:
        if not math.isfinite(self.difference):
            return math.nan
        if not self.exact or not self.lossy:
            return 0.0
        dot = (self.exact**2 + self.lossy**2 - self.difference**2) / 2
        return max(-1.0, min(1.0, dot / (self.exact * self.lossy)))


def _distance(
    exact: Iterable[torch.Tensor | None], lossy: Iterable[torch.Tensor | None]
) -> _Distance:
    pairs = [(a, b) for a, b in zip(exact, lossy, strict=True) if a is not None and b is not None]
    return _Distance(
        _norm(a for a, _ in pairs),
        _norm(b for _, b in pairs),
        _norm(_minus(a, b) for a, b in pairs),
    )


def _norm(xs: Iterable[torch.Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(_wide(x))) for x in xs))


def _minus(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _wide(b) - _wide(a)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
