"""Trials of chains of operators, before a tensor is computed again by them: `Trials`.

Note [a chain is tried once]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where a call site saves the result of a chain of operators for the first time, the chain runs at
once and is compared with the tensor, bit by bit. So a chain whose kernels are not repeatable on
this machine is never used, nor one in whose values somebody wrote behind autograd's back. The try
also says how long it takes. From then on the chain is trusted at this call site: a place in the
sequence of saved tensors of one call of the model, in one thread. In another step, another tensor
of the same module may come to a trusted place. So where the bits of one differ, no chain of this
module that is alike is used any more.

A machine that was busy says too long a time: where nothing was worth its time, the chain is timed
once more in each look (Note [a tensor that stays] in order/looks.py), and the shorter time counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cswap.codecs.tolerance import EXACT
from cswap.devices.memory_rate import memory_rate
from cswap.devices.stopwatch import stopwatch_of
from cswap.ranks import must_agree
from cswap.recent import Recent
from cswap.remat.record import Layout, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.engine.saved.packed import Token
    from cswap.remat.record import Remat
    from cswap.stats.counters import Counters

OPERATOR_S: Final = {"cpu": 1e-5, "cuda": 2e-6}
"""Time of calling an operator, or on a GPU between two kernels: assumed, not measured."""

NEAR: Final = 0.2
"""Relative error up to which a result of rounded inputs counts as the tensor; int4's is 0.12."""

MOST_TRIALS: Final = 1 << 12
"""Trials that are remembered: another shape may run other kernels, so it has a trial of its own."""

Kind = tuple[str, str, Layout]
"""Of chains: module, operators, layout of the result."""

_Key = tuple[Kind, tuple[int, int, int], int]


class Trial(NamedTuple):
    """How a chain did at its call site.

    Attributes:
        agrees: whether it gave the tensor's bits.
        seconds: that it took, or an estimate where that is not measured.
        differs: whether it gave others; else it could not run.
    """

    agrees: bool
    seconds: float
    differs: bool = False


class Trials:
    """The trials of one engine.

    Attributes:
        refused: number of kinds of chains that are not used any more.
        by_site: by module, operators, layout of the result, place in the step, and tolerance: a
            module may write into the result of one of several such chains (`Handle.place`), and
            from rounded inputs a result is near, no more.
    """

    def __init__(
        self, counters: Counters, bring: Callable[[Remat], tuple[list[torch.Tensor], bool]]
    ) -> None:
        """A table without trials.

        Args:
            counters: the engine's.
            bring: returns the inputs of a chain, and whether they have the bits that they had.
        """
        self.refused = 0
        self.by_site: Recent[_Key, Trial] = Recent(MOST_TRIALS)
        self._refused: Recent[Kind, bool] = Recent(MOST_TRIALS)
        self._counters, self._bring = counters, bring

    def of(self, token: Token, *, again: bool = False) -> Trial | None:
        """The trial of the token's chain; None: there is no chain.

        Args:
            token: of the tensor that is being packed.
            again: whether to try it once more; the shorter time counts.
        """
        handle, remat = token.handle, token.remat
        if remat is None or handle.site is None:
            return None
        formula = remat.formula
        kind = handle.site.scope, formula.operator, formula.layout
        if kind in self._refused:
            return Trial(agrees=False, seconds=0.0)
        key = kind, handle.place, handle.tolerance
        trial = self.by_site.get(key)
        if trial is None:
            trial = self.by_site[key] = self._try(token, remat)
        elif again and trial.agrees:
            latest = self._try(token, remat)
            seconds = min(trial.seconds, latest.seconds)
            trial = self.by_site[key] = latest._replace(seconds=seconds)
        if trial.differs:
            self._refused[kind] = True
            self.refused += 1
        return trial

    def agreed(self, kind: Kind, place: tuple[int, int, int], tolerance: int) -> bool:
        """Whether a chain has been tried at a place, for such a tensor, with its bits."""
        trial = self.by_site.get((kind, place, tolerance))
        return trial is not None and trial.agrees

    def _try(self, token: Token, remat: Remat) -> Trial:
        source = token.source
        if source is None:
            return Trial(agrees=False, seconds=0.0)
        try:
            inputs, exact = self._bring(remat)
            source = token.handle.elements(source)
            result = _flat(remat.run(inputs, exact))
            agrees = same_bits(result, source) or (not exact and _is_near(result, source))
            agree = must_agree(lossy=token.handle.tolerance != EXACT)
            if (source.is_cuda or not exact or agree) and not remat.formula.product:
                seconds = _estimated(remat, token, assumed=agree)
            else:
                seconds = _timed(remat, inputs, exact)
        except Exception as error:  # no forward ends because of an operator that may not run again
            self._counters.fall_back("remat", error)
            return Trial(agrees=False, seconds=0.0)
        return Trial(agrees, seconds, not agrees)


def _is_near(result: torch.Tensor, source: torch.Tensor) -> bool:
    # From inputs that a codec has rounded: near enough to be the same operators' result.
    error = (result.double() - source.double()).norm()
    return bool(error <= NEAR * source.double().norm())


def _estimated(remat: Remat, token: Token, *, assumed: bool) -> float:
    # Where the host has only issued the work, and where a choice changes values: those are not to
    # depend on how busy the machine is, unless a goal decides, by measured times.
    formula, kind = remat.formula, token.lane.device.kind
    nbytes = formula.passes * token.handle.raw_nbytes
    bytes_per_s = memory_rate(formula.layout.device, assumed=assumed)
    return nbytes / bytes_per_s + OPERATOR_S[kind] * len(formula.steps)


def _timed(remat: Remat, inputs: list[torch.Tensor], exact: bool) -> float:
    # Of two runs: a busy machine delays some. A GPU waits for its host in the first.
    watch = stopwatch_of(remat.formula.layout.device)
    spans: list[tuple[Any, Any]] = []
    for _ in range(2):
        if spans:
            watch.get_ahead(watch.host_seconds(*spans[0]))
        began = watch.mark()
        remat.run(inputs, exact)
        spans.append((began, watch.mark()))
    return min(watch.seconds(*span) for span in spans)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,), 0)
