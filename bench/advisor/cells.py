"""Cells of model and machine: the cost of each way to choose codecs.

On this CPU all times of codecs are measured. The cost of a step is the engine's: ``device time +
price * bytes``, plus the cost of hooks per swapped tensor.

On a GPU of a hardware profile, times are simulated. Encoded sizes are measured, for a batch `SCALE`
times larger. Codecs run at the profile's rates, and forward runs at the profile's achievable FLOP
rate. The cost of a step is CSwap+'s: device time plus the time on the link that computation does
not hide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from bench.advisor.truth import MODES
from cswap.advisor.advisor import Advisor
from cswap.advisor.call_site import Site
from cswap.advisor.candidates import predicted_ratio
from cswap.advisor.cswap_plus import Swap, sparse_bytes
from cswap.advisor.live_costs import KEEP
from cswap.advisor.price import link_price
from cswap.advisor.rates import DEFAULT_PRICE_S_PER_BYTE, HOOKS_S
from cswap.codecs.tolerance import COARSE, EXACT
from cswap.config import SwapConfig
from cswap.profiler import profile, profile_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.advisor.recording import Recording
    from bench.advisor.truth import Outcome
    from cswap.plan.hardware import Hardware

Option = tuple[float, float]
"""Seconds on the device, encoded bytes."""

SCALE: Final = 256
"""The images are small, so the GPU gets a batch this many times larger."""

ROUNDS: Final = 8
"""Number of steps in which the advisor looks at all tensors, and learns from its measurements."""

PRICES: Final = 400
"""Prices that the oracle tries besides the exact ones."""


class Cell(Protocol):
    """One model on one machine."""

    @property
    def machine(self) -> str:
        """Name of the machine."""
        ...

    @property
    def simulated(self) -> bool:
        """Whether its times are simulated."""
        ...

    def options(self, mode: str) -> list[dict[str, Option]]:
        """Per tensor, the true options in a mode of `MODES`."""
        ...

    def total_s(self, chosen: Sequence[Option]) -> float:
        """Cost of a step, in seconds."""
        ...

    def advised(self, mode: str) -> list[str]:
        """Per tensor, the advisor's choice."""
        ...

    def by_the_paper(self) -> list[str]:
        """Per tensor, the choice by CSwap+'s rule with ZVC."""
        ...


@dataclass(frozen=True)
class ThisCpu:
    """The machine that the benchmark runs on, measured."""

    recording: Recording
    outcomes: Sequence[Mapping[str, Outcome]]
    machine: str = "this CPU"
    simulated: bool = False

    def options(self, mode: str) -> list[dict[str, Option]]:
        """See `Cell.options`; a tensor may also stay."""
        return [
            {KEEP: (0.0, float(saved.x.nbytes))}
            | {
                n: (o.encode_s + o.decode_s + HOOKS_S["cpu"], float(o.nbytes))
                for n, o in of.items()
                if n in MODES[mode]
            }
            for saved, of in zip(self.recording.tensors, self.outcomes, strict=True)
        ]

    def total_s(self, chosen: Sequence[Option]) -> float:
        """See `Cell.total_s`."""
        return sum(seconds + DEFAULT_PRICE_S_PER_BYTE * nbytes for seconds, nbytes in chosen)

    def advised(self, mode: str) -> list[str]:
        """See `Cell.advised`: the engine's own advisor, which gets the result of each choice."""
        advisor = Advisor(SwapConfig(lossy="off" if mode == "lossless" else mode), None)
        for step in range(ROUNDS):
            advisor.begin_step(0.0, look=step)
            for i, (saved, of) in enumerate(
                zip(self.recording.tensors, self.outcomes, strict=True)
            ):
                tolerance = COARSE if saved.x.is_floating_point() else EXACT
                advice = advisor.choose(saved.x, Site(), i, tolerance=tolerance, may_keep=True)
                if advice.codec is not None:
                    name, o = advice.codec.name, of[advice.codec.name]
                    advice.note_encoded(name, saved.x.nbytes, o.nbytes)
                    advice.note_round_trip(name, o.encode_s + o.decode_s)
        return [e.codec for e in advisor.explain()]

    def by_the_paper(self) -> list[str]:
        """See `Cell.by_the_paper`: the price stands for a link that nothing hides."""
        rate = 2 / DEFAULT_PRICE_S_PER_BYTE
        chosen = []
        for saved, of in zip(self.recording.tensors, self.outcomes, strict=True):
            swap, zvc = Swap(saved.x.nbytes, rate, rate), of["zvc"]
            encoded = sparse_bytes(saved.x.nbytes, profile_all(saved.x).zero_fraction)
            pays = saved.x.is_floating_point() and swap.pays(encoded, zvc.encode_s, zvc.decode_s)
            chosen.append("zvc" if pays else "raw")
        return chosen


@dataclass(frozen=True)
class SimulatedGpu:
    """A machine that a profile describes."""

    recording: Recording
    outcomes: Sequence[Mapping[str, Outcome]]
    hardware: Hardware
    simulated: bool = True

    @property
    def machine(self) -> str:
        """See `Cell.machine`."""
        return self.hardware.name

    @cached_property
    def hidden_s(self) -> tuple[float, float]:
        """Seconds of forward and of backward, which has twice its operations."""
        forward_s = SCALE * self.recording.forward_flops / self.hardware.flops["float32"].achievable
        return forward_s, 2 * forward_s

    @property
    def rates(self) -> tuple[float, float]:
        """Rates of the link, out and in, in bytes per second."""
        return self.hardware.d2h_bytes_per_s, self.hardware.h2d_bytes_per_s

    def device_s(self, codec: str, nbytes: float) -> tuple[float, float]:
        """Seconds of encode and decode of a number of raw bytes."""
        if codec == "raw":
            return 0.0, 0.0
        rate = self.hardware.codecs[codec]
        return (
            rate.overhead_s + nbytes / rate.encode_bytes_per_s,
            rate.overhead_s + nbytes / rate.decode_bytes_per_s,
        )

    def options(self, mode: str) -> list[dict[str, Option]]:
        """See `Cell.options`."""
        return [
            {
                n: (sum(self.device_s(n, SCALE * saved.x.nbytes)), float(SCALE * o.nbytes))
                for n, o in of.items()
                if n in self.names(mode)
            }
            for saved, of in zip(self.recording.tensors, self.outcomes, strict=True)
        ]

    def names(self, mode: str) -> set[str]:
        """Codecs of the mode for which the profile has rates."""
        return {n for n in MODES[mode] if n == "raw" or n in self.hardware.codecs}

    def total_s(self, chosen: Sequence[Option]) -> float:
        """See `Cell.total_s`."""
        nbytes = sum(n for _, n in chosen)
        exposed = [
            max(nbytes / rate - seconds, 0.0)
            for rate, seconds in zip(self.rates, self.hidden_s, strict=True)
        ]
        return sum(seconds for seconds, _ in chosen) + sum(exposed)

    def advised(self, mode: str) -> list[str]:
        """See `Cell.advised`: ratios predicted from samples, the price fitted to the link."""
        predicted: list[dict[str, Option]] = []
        for saved, of in zip(self.recording.tensors, self.outcomes, strict=True):
            taken, nbytes = profile(saved.x), SCALE * saved.x.nbytes
            predicted.append(
                {
                    n: (sum(self.device_s(n, nbytes)), nbytes / predicted_ratio(n, taken))
                    for n in of
                    if n in self.names(mode)
                }
            )
        price = link_price([list(row.values()) for row in predicted], self.rates, self.hidden_s)
        return [cheapest(row, price) for row in predicted]

    def by_the_paper(self) -> list[str]:
        """See `Cell.by_the_paper`."""
        chosen = []
        for saved in self.recording.tensors:
            nbytes = SCALE * saved.x.nbytes
            hidden = (saved.forward_share * seconds for seconds in self.hidden_s)
            swap = Swap(nbytes, *self.rates, *hidden)
            encoded = sparse_bytes(nbytes, profile_all(saved.x).zero_fraction)
            pays = saved.x.is_floating_point() and swap.pays(encoded, *self.device_s("zvc", nbytes))
            chosen.append("zvc" if pays else "raw")
        return chosen


def cheapest(row: Mapping[str, Option], price: float) -> str:
    """The codec of the lowest ``device time + price * bytes``."""
    return min(row, key=lambda name: row[name][0] + price * row[name][1])


def oracle(cell: Cell, mode: str) -> list[str]:
    """The best choices found at true costs: over prices, then tensor by tensor."""
    options = cell.options(mode)
    prices = [0.0, *np.geomspace(1e-14, 1e-7, PRICES), DEFAULT_PRICE_S_PER_BYTE]
    best = min(
        ([cheapest(row, price) for row in options] for price in prices),
        key=lambda chosen: total_s(cell, options, chosen),
    )
    least, improved = total_s(cell, options, best), True
    while improved:
        improved = False
        for i, row in enumerate(options):
            for name in row:
                other = [*best[:i], name, *best[i + 1 :]]
                seconds = total_s(cell, options, other)
                if seconds < least * (1 - 1e-9):
                    best, least, improved = other, seconds, True
    return best


def total_s(cell: Cell, options: Sequence[Mapping[str, Option]], chosen: Sequence[str]) -> float:
    """Cost of these choices at true costs."""
    return cell.total_s([row[name] for row, name in zip(options, chosen, strict=True)])


def static(cell: Cell, mode: str) -> dict[str, float]:
    """Cost of every codec forced on all tensors that it takes; the others stay, or go raw."""
    options = cell.options(mode)
    names = sorted({name for row in options for name in row} - {KEEP, "raw"})
    costs = {}
    for name in names:
        chosen = [name if name in row else KEEP if KEEP in row else "raw" for row in options]
        costs[name] = total_s(cell, options, chosen)
    return costs
