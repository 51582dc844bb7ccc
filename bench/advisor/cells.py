"""The cost of a step on this CPU by each way to choose codecs.

All times of codecs are measured. The cost of a step is the engine's: ``device time + price *
bytes``, plus the cost of hooks per swapped tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench.advisor.truth import MODES
from cswap.advisor.advisor import Advisor
from cswap.advisor.call_site import Site
from cswap.advisor.cswap_plus import Swap, sparse_bytes
from cswap.advisor.live_costs import KEEP
from cswap.advisor.rates import DEFAULT_PRICE_S_PER_BYTE, HOOKS_S
from cswap.codecs.tolerance import COARSE, EXACT
from cswap.config import SwapConfig
from cswap.profiler import profile_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.advisor.recording import Recording
    from bench.advisor.truth import Outcome

ROUNDS: Final = 8
"""Number of steps in which the advisor looks at all tensors, and learns from its measurements."""


@dataclass(frozen=True)
class Cell:
    """One model in one mode of `MODES`.

    Attributes:
        recording: its saved tensors.
        outcomes: per tensor, the true bytes and seconds by codec.
        mode: value of the option ``lossy``, or "lossless".
    """

    recording: Recording
    outcomes: Sequence[Mapping[str, Outcome]]
    mode: str

    def costs(self) -> list[dict[str, float]]:
        """Per tensor, the seconds that each codec of the mode costs; a tensor may also stay."""
        return [
            {KEEP: DEFAULT_PRICE_S_PER_BYTE * saved.nbytes}
            | {
                name: o.encode_s + o.decode_s + HOOKS_S["cpu"] + DEFAULT_PRICE_S_PER_BYTE * o.nbytes
                for name, o in of.items()
                if name in MODES[self.mode]
            }
            for saved, of in zip(self.recording.tensors, self.outcomes, strict=True)
        ]

    def total_s(self, chosen: Sequence[str]) -> float:
        """Cost of a step by these choices."""
        return sum(row[name] for row, name in zip(self.costs(), chosen, strict=True))

    def oracle(self) -> list[str]:
        """Per tensor, the cheapest choice at true costs."""
        return [min(row, key=row.__getitem__) for row in self.costs()]

    def advised(self) -> list[str]:
        """Per tensor, the choice of the engine's own advisor, which gets the result of each."""
        lossy = "off" if self.mode == "lossless" else self.mode
        advisor = Advisor(SwapConfig(lossy=lossy), None)
        for step in range(ROUNDS):
            advisor.begin_step(0.0, look=step)
            for i, (x, of) in enumerate(zip(self.recording.tensors, self.outcomes, strict=True)):
                tolerance = COARSE if x.is_floating_point() else EXACT
                advice = advisor.choose(x, Site(), i, tolerance=tolerance, may_keep=True)
                if advice.codec is not None:
                    name, o = advice.codec.name, of[advice.codec.name]
                    advice.note_encoded(name, x.nbytes, o.nbytes)
                    advice.note_round_trip(name, o.encode_s + o.decode_s)
        return [e.codec for e in advisor.explain()]

    def by_the_paper(self) -> list[str]:
        """Per tensor, the choice by CSwap+'s rule with ZVC.

        The price stands for a link that nothing hides.
        """
        rate = 2 / DEFAULT_PRICE_S_PER_BYTE
        chosen = []
        for x, of in zip(self.recording.tensors, self.outcomes, strict=True):
            swap, zvc = Swap(x.nbytes, rate, rate), of["zvc"]
            encoded = sparse_bytes(x.nbytes, profile_all(x).zero_fraction)
            pays = x.is_floating_point() and swap.pays(encoded, zvc.encode_s, zvc.decode_s)
            chosen.append("zvc" if pays else "raw")
        return chosen

    def static(self) -> dict[str, float]:
        """Cost of a step with every codec forced on all tensors that it takes; the others stay."""
        costs = self.costs()
        names = sorted({name for row in costs for name in row} - {KEEP, "raw"})
        return {name: sum(row.get(name, row[KEEP]) for row in costs) for name in names}
