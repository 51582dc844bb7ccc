"""Current costs on one kind of device: codec times with their corrections, and the price λ."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from cswap.advisor.calibration import stored
from cswap.advisor.candidates import (
    default_rate,
    foretold_ratio,
    lossless_candidates,
    nvcomp_candidates,
)
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
from cswap.codecs import nvcomp_library
from cswap.codecs.registry import get_codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cswap.advisor.candidates import FallBack
    from cswap.advisor.cost import Times
    from cswap.schema.tensor import TensorProfile

MARGIN: Final = 0.05
"""Share by which a codec must be cheaper than leaving the tensor in place."""

HYSTERESIS: Final = 0.05
"""Share by which a codec must be cheaper than the codec in use."""

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
        adapts: whether prices and choices follow measurements: times on this machine and in this
            run, sizes of encodings, the order in which they finish.
        corrections: of the codecs' times, by measured round trips.
    """

    def __init__(
        self,
        kind: str,
        host_limit: int | None = None,
        *,
        adapt: bool,
        patience: float = 1.0,
        fall_back: FallBack | None = None,
    ) -> None:
        """Costs by defaults and by this machine's calibration.

        Args:
            kind: "cpu" or "cuda".
            host_limit: bytes of encodings.
            adapt: see ``adapts``.
            patience: factor of the price of a byte, at least 1: see `options.patience_of`.
            fall_back: told why an nvCOMP that is installed is not used; None: nobody is.
        """
        self._kind, self._host_limit, self.adapts = kind, host_limit, adapt
        self._fall_back = fall_back
        self._base_price = min(patience * PRICES_S_PER_BYTE[kind], HOST_PRICE_S_PER_BYTE)
        self.corrections = TimeCorrections()
        self.price_s_per_byte = self._base_price
        self._clock = StepClock()
        measured = stored(kind) if adapt else None
        self._times: dict[str, Times] = {} if measured is None else dict(measured.times)
        self._link = LINK_BYTES_PER_S[kind]
        if self._link is not None and measured is not None and measured.link is not None:
            self._link = (measured.link.d2h_bytes_per_s, measured.link.h2d_bytes_per_s)
        apply_tuned(kind)

    @cached_property
    def lossless(self) -> tuple[str, ...]:
        """Names of the lossless candidates. All codecs are imported to be asked."""
        found = (*lossless_candidates(), *nvcomp_candidates(self._kind))
        why = nvcomp_library.failure() if self._kind == "cuda" else None
        if why is not None and self._fall_back is not None:
            self._fall_back("nvcomp", why, "taking other codecs")
        return found

    def quote(
        self, name: str, profile: TensorProfile, ratio_factor: float = 1.0
    ) -> Candidate | None:
        """The codec's predicted cost for a tensor of this profile.

        Args:
            name: of the codec.
            profile: of the tensor's values.
            ratio_factor: for the predicted ratio.

        Returns:
            None if the codec does not predict its ratio for such a tensor.
        """
        price = self.price_s_per_byte
        if name == KEEP:
            return candidate(name, profile.nbytes, 1.0, 0.0, price)
        ratio = foretold_ratio(get_codec(name), profile)
        if ratio is None:
            return None
        device_s = self.corrections.seconds(name, self.model_s(name, profile))
        device_s += HOOKS_S[self._kind]
        return candidate(name, profile.nbytes, ratio * ratio_factor, device_s, price)

    def model_s(self, name: str, profile: TensorProfile) -> float:
        """Predicted seconds of a round trip, without corrections."""
        times = self._times.get(name) or default_rate(get_codec(name), self._kind)
        return times.device_s(profile)

    def observe(self, name: str, profile: TensorProfile, device_s: float) -> None:
        """Learn from a round trip of a tensor of this profile that took ``device_s``."""
        traits = get_codec(name).traits
        if not self.adapts or traits.predicted_ratio is None:
            return
        rate = traits.rates.get(self._kind)
        is_known = name in self._times or (rate is not None and not rate.assumed)
        self.corrections.observe(name, self.model_s(name, profile), device_s, of_device=is_known)

    def begin_step(self, now_s: float, exposed_s: float) -> None:
        """A step begins.

        Args:
            now_s: monotonic time.
            exposed_s: seconds that computation has waited for swaps since the first step.
        """
        self._clock.begin_step(now_s, exposed_s)

    def look_back(self, chosen_from: Iterable[Sequence[Candidate]]) -> None:
        """Fit the price and the corrections. Args: chosen_from: candidates of the last tensors."""
        self.corrections.refit()
        self._fit_price(chosen_from)

    def _fit_price(self, chosen_from: Iterable[Sequence[Candidate]]) -> None:
        step_s = self._clock.step_s if self.adapts else None
        if self._host_limit is None and (self._link is None or step_s is None):
            return
        options = [
            [(c.device_s, c.nbytes) for c in candidates if c.codec != KEEP]
            for candidates in chosen_from
            if candidates
        ]
        if not options:  # a named codec has no market, and its bytes are not free
            return
        price = self._base_price
        if self._link is not None and step_s is not None:
            hidden = (FORWARD_SHARE * step_s, (1 - FORWARD_SHARE) * step_s)
            price = link_price(options, self._link, hidden)
        if self._host_limit is not None:
            price = max(price, fit_price(options, self._host_limit, HOST_PRICE_S_PER_BYTE))
        self.price_s_per_byte = price


def cheapest(
    candidates: tuple[Candidate, ...], why: str, used: str | None
) -> tuple[Candidate, str]:
    """The candidate to be taken, and the reason.

    Args:
        candidates: the cheapest first.
        why: the reason for the first one.
        used: codec in use; None: there is none.
    """
    best = candidates[0]
    stay = next((c for c in candidates if c.codec == KEEP), None)
    if stay is not None and best.cost_s > (1 - MARGIN) * stay.cost_s:
        best, why = stay, f"nothing pays by {MARGIN:.0%}"
    current = next((c for c in candidates if c.codec == used), None)
    if current is None or current.codec == best.codec:
        return best, why
    margin = MARGIN if best.codec == KEEP else 0.0  # KEEP is best where none beats it by MARGIN
    if (1 - HYSTERESIS) * current.cost_s < (1 - margin) * best.cost_s:
        return current, f"no other is cheaper by {HYSTERESIS:.0%}"
    return best, why
