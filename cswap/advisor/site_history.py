"""The advisor's memory of a call site: its choice, the reason, and the measured outcome."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

from cswap.advisor.candidates import RAW, predicted_ratio
from cswap.advisor.correction import Correction, usable
from cswap.display import visible

if TYPE_CHECKING:
    from cswap.advisor.call_site import Site
    from cswap.advisor.cost import Candidate
    from cswap.codecs.base import Codec
    from cswap.profiler import LateProfile
    from cswap.schema.tensor import TensorProfile

RESAMPLE_EVERY: Final = 8
"""Swap-outs of one call site between its first samples: zeros drift with training."""

MOST_USES: Final = 64
"""Most swap-outs between two samples. Each one that confirms the choice doubles their distance."""

LEARN_FIRST: Final = 16
"""Encodings, and round trips, by one codec at one call site that all correct the predictions."""

LEARN_EVERY: Final = 4
"""Of later ones, each of so many: with cold caches, a correction takes as long as an encode."""

DRIFT: Final = 0.05
"""Relative change of the measured ratio after which the last sample is stale."""

WEIGHT: Final = 0.2
"""Weight of the newest measurement in the moving averages that `Explanation` shows."""

_RATIO, _DEVICE_S, _COUNT, _TRIPS = range(4)


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

    def profile_for(self, nbytes: int) -> TensorProfile | None:
        """The last sample, as one of a tensor of so many bytes."""
        found = self.profile
        return found if found is None or found.nbytes == nbytes else replace(found, nbytes=nbytes)

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


class Learner(Protocol):
    """Takes measured times into later prices.

    Attributes:
        adapts: whether later choices may depend on measurements.
        version: of the prices and corrections.
    """

    adapts: bool
    version: int

    def observe(self, codec: str, profile: TensorProfile, device_s: float) -> None:
        """Note the seconds of encode and decode together, of a tensor with this profile."""
        ...


@dataclass(slots=True)
class SiteMemory:
    """State of one call site. Written by the advisor under its lock, and by `note_encoded`.

    Attributes:
        explanation: the last decision.
        codec: its codec; None if the tensor stays.
        uses: number of uses since the last sample.
        version: version of the prices and corrections at the last decision.
        pending: a sample that has not arrived yet.
        stale: whether the ratio has changed since the sample was taken.
        switches: number of changes of the choice.
        epoch: epoch of the last sample.
        fixed: whether the decision depends on no values.
        sample_every: uses after which the values are sampled again.
        good_for: uses in which no sample is due, unless the epoch or the ratio changes.
        advice: the last decision, as it was given out.
    """

    explanation: Explanation
    codec: Codec | None
    uses: int = 1
    version: int = 0
    pending: LateProfile | None = None
    stale: bool = False
    switches: int = 0
    epoch: int = 0
    fixed: bool = False
    sample_every: int = RESAMPLE_EVERY
    good_for: float = 0.0
    advice: Advice | None = field(default=None, repr=False, compare=False)
    _reference: tuple[str, float] = ("", 0.0)
    _ratios: dict[str, Correction] = field(default_factory=dict)
    _seen: dict[str, list[float]] = field(default_factory=dict)

    def decide(self, explanation: Explanation, codec: Codec | None, version: int) -> None:
        """Take over a new decision, after a new sample or at new prices."""
        changed = explanation.codec != self.explanation.codec
        self.switches += changed
        if changed or self.stale:
            self.sample_every = RESAMPLE_EVERY
        elif self.uses > self.sample_every:  # a sample was due, and confirms the choice
            self.sample_every = min(2 * self.sample_every, MOST_USES)
        self.explanation, self.codec, self.version = explanation, codec, version

    def sampled(self) -> None:
        """Note that the decision rests on a new sample."""
        self.uses, self.pending, self.stale, self._reference = 1, None, False, ("", 0.0)

    def ratio_factor(self, codec: str) -> float:
        """Factor for the codec's predicted ratio at this call site."""
        known = self._ratios.get(codec)
        return 1.0 if known is None else known.factor

    def note_encoded(self, codec: str, raw_nbytes: int, nbytes: int, *, learn: bool = True) -> None:
        """Note the size of an encoding; ``learn``: whether later choices may depend on it."""
        if nbytes <= 0:
            return
        ratio = raw_nbytes / nbytes
        seen = self._seen.get(codec)
        if seen is None:
            seen = self._seen[codec] = [ratio, 0.0, 1, 0]
        else:
            seen[_RATIO] += WEIGHT * (ratio - seen[_RATIO])
            seen[_COUNT] += 1
        if not learn:
            return
        if codec == RAW != self.explanation.codec:
            self.stale = True  # the chosen codec has failed, and may be no candidate any more
        if self._reference[0] != codec:
            self._reference = (codec, ratio)
        elif abs(ratio - self._reference[1]) > DRIFT * self._reference[1]:
            self.stale = True
        profile = self.explanation.profile
        if profile is not None and codec != RAW and _is_due(seen[_COUNT]):
            predicted = predicted_ratio(codec, profile)
            if usable(predicted, ratio):
                self._ratios.setdefault(codec, Correction()).observe(predicted, ratio)

    def note_round_trip(self, codec: str, device_s: float) -> bool:
        """Note the seconds of encode and decode of a tensor of this call site.

        Returns:
            Whether they should correct the predictions, too.
        """
        seen = self._seen.get(codec)
        if seen is None:
            return True
        if device_s > 0:
            seen[_DEVICE_S] += (WEIGHT if seen[_DEVICE_S] else 1) * (device_s - seen[_DEVICE_S])
        seen[_TRIPS] += 1
        return _is_due(seen[_TRIPS])

    def explained(self) -> Explanation:
        """The last decision with its measured outcome."""
        seen = self._seen.copy()  # a snapshot: other threads add to it meanwhile
        measured = tuple(
            Measured(codec, ratio, device_s, int(count))
            for codec, (ratio, device_s, count, _) in seen.items()
        )
        return replace(self.explanation, measured=measured, switches=self.switches)


@dataclass(slots=True)
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
    costs: Learner
    learns: bool = field(init=False)

    def __post_init__(self) -> None:
        self.learns = bool(self.memory.explanation.candidates)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The codecs among which it was chosen, cheapest first; empty if there was no choice."""
        return self.memory.explanation.candidates

    def note_encoded(self, codec: str, raw_nbytes: int, nbytes: int) -> None:
        """Note that the tensor was encoded; ``codec`` may differ from the advice."""
        self.memory.note_encoded(codec, raw_nbytes, nbytes, learn=self.costs.adapts)

    def note_round_trip(self, codec: str, device_s: float) -> None:
        """Note the seconds of encode and decode together; most of them correct nothing."""
        if not self.memory.note_round_trip(codec, device_s):
            return
        taken = self.memory.explanation.profile
        if taken is not None:
            self.costs.observe(codec, taken, device_s)


def _is_due(count: float) -> bool:
    # Whether the encoding, or the round trip, of this number corrects the predictions.
    return count <= LEARN_FIRST or not count % LEARN_EVERY
