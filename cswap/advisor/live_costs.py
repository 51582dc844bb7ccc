"""Current costs on one kind of device: codec times with their corrections, and the price λ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.advisor.calibration import stored
from cswap.advisor.candidates import default_rate, foretold_ratio
from cswap.advisor.correction import TimeCorrections
from cswap.advisor.cost import Candidate, candidate
from cswap.advisor.price import FORWARD_SHARE, StepClock, fit_price, link_price
from cswap.advisor.rates import (
    HOOKS_S,
    HOST_PRICE_S_PER_BYTE,
    LINK_BYTES_PER_S,
    PRICES_S_PER_BYTE,
)
from cswap.advisor.tuner import apply_tuned
from cswap.codecs.registry import get_codec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.advisor.cost import Times
    from cswap.advisor.site_history import SiteMemory
    from cswap.codecs.base import Codec
    from cswap.schema.tensor import TensorProfile

MOVED: Final = 0.2
"""Relative change of a price or a correction after which choices are made again."""

REFIT_EVERY: Final = 4
"""Steps between two updates of prices and corrections."""

KEEP: Final = "keep"
"""Candidate that leaves the tensor in its own memory: no time, every byte."""

REMAT: Final = "remat"
"""Candidate that computes the tensor again: an operator's time, no bytes."""

UNREAD: Final = "unread"
"""Way of a tensor that backward does not read: nothing is held, so there is no choice."""


class LiveCosts:
    """Predicted cost of codecs on one kind of device, corrected by measurements.

    Attributes:
        price_s_per_byte: λ, the price of an encoded byte.
        version: raised whenever choices should be made again.
        adapts: whether prices and choices follow measurements: times on this machine and in this
            run, sizes of encodings, the order in which they finish.
        corrections: of the codecs' times, by measured round trips.
    """

    def __init__(
        self, kind: str, host_limit: int | None, *, adapt: bool, patience: float = 1.0
    ) -> None:
        """Costs by defaults and by this machine's calibration.

        Args:
            kind: "cpu" or "cuda".
            host_limit: bytes of encodings.
            adapt: see ``adapts``.
            patience: factor of the price of a byte, at least 1: see `options.patience_of`.
        """
        self._kind, self._host_limit, self.adapts = kind, host_limit, adapt
        self._base_price = min(patience * PRICES_S_PER_BYTE[kind], HOST_PRICE_S_PER_BYTE)
        self.corrections = TimeCorrections()
        self.price_s_per_byte = self._base_price
        self.version = 0
        self._clock = StepClock()
        self._n_steps = 0
        self._settled: dict[str, float] = {}
        measured = stored(kind) if adapt else None
        self._times: dict[str, Times] = {} if measured is None else dict(measured.times)
        self._link = LINK_BYTES_PER_S[kind]
        if self._link is not None and measured is not None and measured.link is not None:
            self._link = (measured.link.d2h_bytes_per_s, measured.link.h2d_bytes_per_s)
        apply_tuned(kind)

    def quote(
        self, name: str, profile: TensorProfile, memory: SiteMemory | None
    ) -> Candidate | None:
        """The codec's predicted cost for a tensor of this profile, saved at that call site.

        Returns:
            None if the codec does not predict its ratio for such a tensor.
        """
        price = self.price_s_per_byte
        if name == KEEP:
            return candidate(name, profile.nbytes, 1.0, 0.0, price)
        codec = get_codec(name)
        ratio = foretold_ratio(codec, profile)
        if ratio is None:
            return None
        if memory is not None:
            ratio *= memory.ratio_factor(name)
        device_s = self.corrections.seconds(name, self._times_of(codec).device_s(profile))
        return candidate(name, profile.nbytes, ratio, device_s + HOOKS_S[self._kind], price)

    def model_s(self, name: str, profile: TensorProfile) -> float:
        """Predicted seconds of a round trip, without corrections."""
        return self._times_of(get_codec(name)).device_s(profile)

    def observe(self, name: str, profile: TensorProfile, device_s: float) -> None:
        """Learn from a round trip of a tensor of this profile that took ``device_s``."""
        codec = get_codec(name)
        if not self.adapts or codec.traits.predicted_ratio is None:
            return
        rate = codec.traits.rates.get(self._kind)
        is_known = name in self._times or (rate is not None and not rate.assumed)
        predicted_s = self._times_of(codec).device_s(profile)
        self.corrections.observe(name, predicted_s, device_s, of_device=is_known)

    def _times_of(self, codec: Codec) -> Times:
        return self._times.get(codec.name) or default_rate(codec, self._kind)

    def begin_step(self, now_s: float, exposed_s: float) -> bool:
        """A step begins; returns whether it is time to `look_back` at the step before."""
        self._clock.begin_step(now_s, exposed_s)
        self._n_steps += 1
        return self._n_steps % REFIT_EVERY == 0

    def look_back(self, used: Iterable[SiteMemory]) -> None:
        """Fit prices to the step before, which used these call sites."""
        self.corrections.forget()
        self._refit(used, self._clock.step_s)
        self._note_moves()

    def _refit(self, used: Iterable[SiteMemory], step_s: float | None) -> None:
        if self._host_limit is None and (self._link is None or step_s is None or not self.adapts):
            return
        options = [
            [(c.device_s, c.nbytes) for c in m.explanation.candidates if c.codec != KEEP]
            for m in used
            if m.explanation.candidates
        ]
        if not options:  # a named codec has no market, and its bytes are not free
            return
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
