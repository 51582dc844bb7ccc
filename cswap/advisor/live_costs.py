"""Times and prices on one kind of device, as they stand: model, corrections, λ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.advisor.calibration import stored
from cswap.advisor.correction import TimeCorrections
from cswap.advisor.cost import predict
from cswap.advisor.price import FORWARD_SHARE, StepClock, fit_price, link_price
from cswap.advisor.rates import HOOKS_S, HOST_PRICE_S_PER_BYTE, LINK_BYTES_PER_S, RATES
from cswap.advisor.tuner import apply_tuned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cswap.advisor.cost import Candidate, Times
    from cswap.advisor.site_history import SiteMemory
    from cswap.schema.tensor import TensorProfile

MOVED: Final = 0.1
"""Relative change of a price or a correction at which choices are made again."""

REFIT_EVERY: Final = 4
"""Steps between two looks at what prices and corrections have become."""

KEEP: Final = "keep"
"""Stands for the tensor's own memory among the candidates: no time, every byte."""


class Market:
    """What codecs cost on one kind of device.

    Attributes:
        price_s_per_byte: λ, of an encoded byte.
        version: raised whenever choices should be made again.
        steps: that have begun.
        adapts: whether prices and choices follow measurements: of time, on this machine and in this
            run, and of encodings by when they happen to be done.
        corrections: of the codecs' times, by what was measured.
    """

    def __init__(self, kind: str, host_limit: int | None, *, adapt: bool) -> None:
        """Args: kind: "cpu" or "cuda"; host_limit: bytes of encodings; adapt: see ``adapts``."""
        rates, self._base_price = RATES[kind]
        self._kind, self._rates, self._host_limit, self.adapts = kind, rates, host_limit, adapt
        self.corrections = TimeCorrections()
        self.price_s_per_byte = self._base_price
        self.version = 0
        self._clock = StepClock()
        self.steps = 0
        self._settled: dict[str, float] = {}
        self._times: Mapping[str, Times] = {}
        self._link = LINK_BYTES_PER_S[kind]
        self._load()
        apply_tuned(kind)

    def _load(self) -> None:
        # As measured on this machine, if it was calibrated.
        self._calibration = stored(self._kind) if self.adapts else None
        measured = self._calibration
        self._times = self._rates if measured is None else {**self._rates, **measured.times}
        if self._link is not None and measured is not None and measured.link is not None:
            self._link = (measured.link.d2h_bytes_per_s, measured.link.h2d_bytes_per_s)

    def quote(self, name: str, profile: TensorProfile, memory: SiteMemory | None) -> Candidate:
        """The codec's predicted cost for a tensor of this profile, saved at that site."""
        ratio_factor = 1.0 if memory is None else memory.ratio_factor(name)
        times, price = self._times[name], self.price_s_per_byte
        if name == KEEP:
            return predict(name, profile, times, price)
        device_s = self.corrections.seconds(name, times.device_s(profile))
        return predict(
            name,
            profile,
            times,
            price,
            device_s=device_s,
            ratio_factor=ratio_factor,
            extra_s=HOOKS_S,
        )

    def model_s(self, name: str, profile: TensorProfile) -> float:
        """What the model says that a round trip takes, uncorrected."""
        return self._times[name].device_s(profile)

    def observe(self, codec: str, profile: TensorProfile, device_s: float) -> None:
        """A round trip of a tensor of this profile took that long."""
        times = self._times.get(codec)
        if self.adapts and times is not None:
            self.corrections.observe(codec, times.device_s(profile), device_s)

    def begin_step(self, now_s: float, exposed_s: float) -> bool:
        """A step begins; whether it is time to `look_back` at the one before."""
        self._clock.begin_step(now_s, exposed_s)
        self.steps += 1
        return self.steps % REFIT_EVERY == 0

    def look_back(self, used: Iterable[SiteMemory]) -> float | None:
        """Let prices follow the step before, which used these sites; seconds of a step or None."""
        self.corrections.forget()
        if self.adapts and stored(self._kind) is not self._calibration:
            self._load()
            self.corrections = TimeCorrections()
            self.version += 1
        step_s = self._clock.step_s
        self._refit(used, step_s)
        self._note_moves()
        return step_s

    def _refit(self, used: Iterable[SiteMemory], step_s: float | None) -> None:
        if self._host_limit is None and (self._link is None or step_s is None or not self.adapts):
            return
        options = [
            [(c.device_s, c.nbytes) for c in m.explanation.candidates if c.codec != KEEP]
            for m in used
            if m.explanation.candidates
        ]
        price = self._base_price
        if self._link is not None and step_s is not None and self.adapts:
            hidden = (FORWARD_SHARE * step_s, (1 - FORWARD_SHARE) * step_s)
            price = link_price(options, self._link, hidden)
        if self._host_limit is not None:
            price = max(price, fit_price(options, self._host_limit, HOST_PRICE_S_PER_BYTE))
        self.price_s_per_byte = price

    def _note_moves(self) -> None:
        found = {**self.corrections.snapshot(), "price": self.price_s_per_byte}
        if any(_moved(self._settled.get(name), value) for name, value in found.items()):
            self.version += 1
            self._settled = found


def _moved(before: float | None, now: float) -> bool:
    return before is None or abs(now - before) > MOVED * max(abs(before), abs(now), 1e-15)
