"""The advisor's memory of a call site: its choice, the reason, and the measured outcome."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from cswap.advisor.candidates import RAW, predicted_ratio
from cswap.display import visible

if TYPE_CHECKING:
    from cswap.advisor.call_site import Site
    from cswap.advisor.cost import Candidate
    from cswap.advisor.live_costs import LiveCosts
    from cswap.codecs.base import Codec
    from cswap.profiler import LateProfile
    from cswap.schema.tensor import TensorProfile

DRIFT: Final = 0.05
"""Relative change of the measured ratio after which the last sample is stale."""

STALE: Final = -1.0
"""See `SiteMemory`."""

WEIGHT: Final = 0.2
"""Weight of the newest measurement in the moving averages that `Explanation` shows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Moving averages over the round trips of a call site's tensors through one codec.

    Attributes:
        codec: its name.
        ratio: raw bytes over encoded bytes.
        device_s: seconds of encode and decode together; 0.0 before the first decode.
        count: number of encodes.
    """

    codec: str
    ratio: float
    device_s: float = 0.0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Explanation:
    """The decision for one call site, with its reasons and its outcome.

    Attributes:
        position: number of the tensor among those saved in a step.
        site: place in the model.
        profile: profile of the last sample; None if the choice did not depend on one.
        candidates: predicted costs, cheapest first; empty if there was no choice.
        codec: the choice.
        reason: reason of the choice, in words.
        price_s_per_byte: price of an encoded byte at the time of the choice.
        measured: outcome by codec.
        switches: number of changes of the choice.
        hooks_s: predicted host time besides the codec's; times of candidates contain it.
        known_nbytes: of the tensor, where there is neither a sample nor a candidate.
    """

    position: int
    site: Site
    profile: TensorProfile | None
    candidates: tuple[Candidate, ...]
    codec: str
    reason: str
    price_s_per_byte: float = 0.0
    measured: tuple[Measured, ...] = ()
    switches: int = 0
    hooks_s: float = 0.0
    known_nbytes: int | None = None

    @property
    def nbytes(self) -> int | None:
        """Bytes of the tensor; None: not known, since nothing depended on them."""
        if self.profile is not None:
            return self.profile.nbytes
        if self.known_nbytes is not None:
            return self.known_nbytes
        return max((int(c.nbytes) for c in self.candidates), default=None)

    @property
    def measured_cost_s(self) -> float | None:
        """The chosen codec's cost by measurement; None before the first round trip."""
        found = next((m for m in self.measured if m.codec == self.codec), None)
        if found is None or not found.device_s or self.profile is None:
            return None
        device_s = found.device_s + self.hooks_s
        return device_s + self.price_s_per_byte * self.profile.nbytes / found.ratio

    @property
    def regret_s(self) -> float | None:
        """Measured cost less the cheapest other candidate's predicted cost; 0.0 if negative."""
        others = [c.cost_s for c in self.candidates if c.codec != self.codec]
        cost_s = self.measured_cost_s
        if cost_s is None or not others:
            return None
        return max(0.0, cost_s - min(others))

    def __str__(self) -> str:
        where = self.site.scope or self.site.operator or self.site.producer or "-"
        text = f"#{self.position} " + visible(f"{where}: {self.codec} ({self.reason})")
        if self.profile is not None:
            p = self.profile
            text += f"; {p.dtype}, {p.nbytes} bytes, {100 * p.zero_fraction:.0f} % zeros"
        lines = [(c.codec, c.ratio, "cost", c.cost_s) for c in self.candidates]
        lines += [(m.codec, m.ratio, "took", m.device_s) for m in self.measured]
        for codec, ratio, what, seconds in lines:
            text += f"\n    {visible(codec):<10} ratio {ratio:6.2f}  {what} {1e6 * seconds:8.1f} us"
        return text


@dataclass(slots=True)
class SiteMemory:
    """State of one call site. Written by the advisor under its lock, and by `Advice`.

    Attributes:
        explanation: the last decision.
        advice: it, as it is given out.
        used_in: step of the last use.
        sampled: number of the round of samples (`Advisor.begin_step`) on which the decision rests;
            infinite if it depends on no values; `STALE` if it is to be made again.
        pending: a sample that has not arrived yet.
        switches: number of changes of the choice.
    """

    explanation: Explanation
    advice: Advice = field(init=False, repr=False, compare=False)
    used_in: int = 0
    sampled: float = math.inf
    pending: LateProfile | None = None
    switches: int = 0
    _first: tuple[str, float] | None = None  # codec and ratio of the tensor that was sampled
    _factors: dict[str, float] = field(default_factory=dict)
    _measured: dict[str, Measured] = field(default_factory=dict)

    def decide(
        self, explanation: Explanation, codec: Codec | None, costs: LiveCosts, sampled: float
    ) -> None:
        """Take over a new decision.

        Args:
            explanation: it.
            codec: its codec; None: the tensor stays.
            costs: of the kind of device.
            sampled: see the attributes.
        """
        self.switches += explanation.codec != self.explanation.codec
        self.explanation, self.advice = (
            explanation,
            Advice(codec, self, costs, bool(explanation.candidates)),
        )
        self.sampled, self.pending, self._first = sampled, None, None

    @property
    def used(self) -> str | None:
        """The codec that was chosen among candidates; None: there was no choice yet."""
        return self.explanation.codec if self.explanation.candidates else None

    def ratio_factors(self) -> dict[str, float]:
        """Factors by codec, for predicted ratios at this call site: by encodings so far."""
        profile = self.explanation.profile
        if self._first is not None and profile is not None:
            codec, ratio = self._first
            self._factors[codec] = ratio / predicted_ratio(codec, profile)
        return self._factors

    def note_encoded(self, codec: str, raw_nbytes: int, nbytes: int, *, learn: bool = True) -> None:
        """Note the size of an encoding; ``learn``: whether later choices may depend on it."""
        if nbytes <= 0:
            return
        ratio = raw_nbytes / nbytes
        known = self._measured.get(codec)
        if known is None:
            self._measured[codec] = Measured(codec, ratio)
        else:
            mean = known.ratio + WEIGHT * (ratio - known.ratio)
            self._measured[codec] = replace(known, ratio=mean, count=known.count + 1)
        if not learn:
            return
        if codec == RAW != self.explanation.codec:
            self.sampled = STALE  # the chosen codec has failed, and may be no candidate any more
        if self._first is None or self._first[0] != codec:
            self._first = codec, ratio
            foretold = next((c.ratio for c in self.explanation.candidates if c.codec == codec), 0.0)
            if abs(ratio - foretold) > DRIFT * foretold > 0:
                self.sampled = STALE
        elif abs(ratio - self._first[1]) > DRIFT * self._first[1]:
            self.sampled = STALE

    def note_round_trip(self, codec: str, device_s: float) -> None:
        """Note the seconds of encode and decode of a tensor of this call site."""
        known = self._measured.get(codec)
        if known is not None and device_s > 0:
            weight = WEIGHT if known.device_s else 1
            mean_s = known.device_s + weight * (device_s - known.device_s)
            self._measured[codec] = replace(known, device_s=mean_s)

    def explained(self) -> Explanation:
        """The last decision with its measured outcome."""
        measured = tuple(self._measured.copy().values())  # other threads add to it meanwhile
        return replace(self.explanation, measured=measured, switches=self.switches)


@dataclass(frozen=True, slots=True)
class Advice:
    """The advisor's choice for one tensor; takes notes of the outcome.

    Attributes:
        codec: codec to encode with; None: leave the tensor in place.
        memory: of the call site.
        costs: of its kind of device.
        learns: whether there was a choice, so that the outcome should be noted.
    """

    codec: Codec | None
    memory: SiteMemory
    costs: LiveCosts
    learns: bool

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The codecs among which it was chosen, cheapest first; empty if there was no choice."""
        return self.memory.explanation.candidates

    def note_encoded(self, codec: str, raw_nbytes: int, nbytes: int) -> None:
        """Note that the tensor was encoded; ``codec`` may differ from the advice."""
        self.memory.note_encoded(codec, raw_nbytes, nbytes, learn=self.costs.adapts)

    def note_round_trip(self, codec: str, device_s: float) -> None:
        """Note the seconds of encode and decode together."""
        self.memory.note_round_trip(codec, device_s)
        taken = self.memory.explanation.profile
        if taken is not None:
            self.costs.observe(codec, taken, device_s)
