"""Decides per tensor: profile, price the candidates, take the cheapest. Remembers per call site."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from cswap.advisor import rules
from cswap.advisor.calibration import stored
from cswap.advisor.cost import Candidate, predict
from cswap.advisor.rates import RATES
from cswap.advisor.site import Site
from cswap.codecs.registry import get_codec
from cswap.profiler import LateProfile, profile
from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from cswap.advisor.cost import Times
    from cswap.codecs.base import Codec
    from cswap.config import SwapConfig
    from cswap.schema.plan import Plan
    from cswap.schema.tensor import TensorProfile

RESAMPLE_EVERY: Final = 16
"""Swap-outs of one call site between two samples of its values: zeros drift with training."""

MAX_SITES: Final = 1 << 14

KEEP: Final = "keep"
"""Stands for the tensor's own memory among the candidates: no time, every byte."""

MARGIN: Final = 0.1
"""Share by which a codec must beat leaving the tensor alone: moving has costs beyond the model."""

EARLY: Final = "its values are not known yet"
"""Reason for a choice made before a GPU's sample has arrived."""

_CHEAP: Final = ("bitpack", "zvc", "raw")
"""The first of these that takes a tensor encodes it until it has been profiled."""

_LOSSLESS: Final = ("zvc", "zvc+expk", "expk", "bitpack", "rle", "csr")

_SiteKey = tuple[int, str, "torch.dtype", int, bool]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one call site's tensors are encoded as they are.

    Attributes:
        position: among the tensors saved in a step.
        site: where that is in the model.
        profile: of the last sample; None if the choice did not depend on one.
        candidates: predicted costs, cheapest first; empty if there was no choice.
        codec: the choice.
        reason: in words.
    """

    position: int
    site: Site
    profile: TensorProfile | None
    candidates: tuple[Candidate, ...]
    codec: str
    reason: str

    def __str__(self) -> str:
        where = self.site.scope or self.site.operator or self.site.producer or "-"
        text = f"#{self.position} {where}: {self.codec} ({self.reason})"
        if self.profile is not None:
            p = self.profile
            text += f"; {p.dtype}, {p.nbytes} bytes, {100 * p.zero_fraction:.0f} % zeros"
        for c in self.candidates:
            text += f"\n    {c.codec:<10} ratio {c.ratio:6.2f}  cost {1e6 * c.cost_s:8.1f} us"
        return text


@dataclass(slots=True)
class _Memory:
    explanation: Explanation
    codec: Codec | None
    uses: int = 1
    pending: LateProfile | None = None


class Advisor:
    """Chooses codecs. Thread-safe.

    Attributes:
        may_use_lossy: whether the options admit a lossy codec for any tensor at all.
    """

    def __init__(self, config: SwapConfig, plan: Plan | None) -> None:
        """Args: config: parsed options; plan: decisions that come before all others.

        Raises:
            ConfigError: the options do not fit together.
        """
        rules.check(config, plan)
        self._config = config
        self._plan = plan
        self._lossy = rules.lossy_candidates(config.lossy)
        self.may_use_lossy = rules.may_use_lossy(config, plan)
        self._lock = threading.Lock()
        self._sites: dict[_SiteKey, _Memory] = {}

    def may_be_lossy(self, tensor: torch.Tensor, site: Site) -> bool:
        """Whether lossy codecs are allowed for this tensor, by the options and by its role."""
        return self.may_use_lossy and rules.may_be_lossy(tensor, site)

    def plan_keeps(self, position: int) -> bool:
        """Whether the plan leaves the tensor at this position on the device."""
        decision = self._plan.decisions.get(position) if self._plan else None
        return decision is not None and decision.action == "keep"

    def choose(
        self, x: torch.Tensor, site: Site, position: int, *, lossy_ok: bool, may_keep: bool
    ) -> Codec | None:
        """The codec for x [n], flat, saved at this site and position of the step.

        Args:
            x: the values.
            site: where they were saved.
            position: in the step.
            lossy_ok: whether a lossy codec may be chosen.
            may_keep: whether the answer may be None: leave it where it is, nothing pays.

        Raises:
            ConfigError: the user's own function named a codec that does not exist.
        """
        key = (position, site.scope, x.dtype, x.numel(), lossy_ok)
        with self._lock:
            memory = self._sites.get(key)
            if memory is not None and memory.pending is None and memory.uses < RESAMPLE_EVERY:
                memory.uses += 1
                return memory.codec
        taken = None
        if _is_far(x) and self._needs_profile(x, site, position):
            pending = LateProfile(x) if memory is None or not memory.pending else memory.pending
            taken = pending.get()
            if taken is None:
                return self._wait_for(pending, key, memory, x)
        explanation = self._decide(x, site, position, taken, lossy_ok=lossy_ok, may_keep=may_keep)
        codec = None if explanation.codec == KEEP else get_codec(explanation.codec)
        self._remember(key, _Memory(explanation, codec))
        return codec

    def _remember(self, key: _SiteKey, memory: _Memory) -> None:
        with self._lock:
            if len(self._sites) >= MAX_SITES:
                self._sites.clear()
            self._sites[key] = memory

    def _wait_for(
        self, pending: LateProfile, key: _SiteKey, memory: _Memory | None, x: torch.Tensor
    ) -> Codec | None:
        # Until the sample has arrived: as before, or what is cheap and never much of a loss.
        if memory is None:
            codec = next(c for c in map(get_codec, _CHEAP) if c.supports(x.dtype, x.device.type))
            position, scope = key[:2]
            memory = _Memory(Explanation(position, Site(scope), None, (), codec.name, EARLY), codec)
        memory.pending = pending
        self._remember(key, memory)
        return memory.codec

    def _needs_profile(self, x: torch.Tensor, site: Site, position: int) -> bool:
        forced, _ = self._forced(x, site, position)
        return forced in (None, "auto")

    def explain(self) -> list[Explanation]:
        """The latest decision of every call site, in the order of the step."""
        with self._lock:
            found = [memory.explanation for memory in self._sites.values()]
        return sorted(found, key=lambda e: e.position)

    def _decide(
        self,
        x: torch.Tensor,
        site: Site,
        position: int,
        taken: TensorProfile | None,
        *,
        lossy_ok: bool,
        may_keep: bool,
    ) -> Explanation:
        forced, reason = self._forced(x, site, position)
        if callable(self._config.codec) and forced is None:
            taken = taken or profile(x)
            forced, reason = self._config.codec(taken), "the codec function said so"
        if forced not in (None, "auto"):
            name, why = self._admissible(str(forced), x, lossy_ok=lossy_ok)
            if name is not None:
                return Explanation(position, site, taken, (), name, reason)
            reason = why
        else:
            reason = ""
        stay = KEEP if may_keep else "raw"
        names = (stay, *_LOSSLESS, *(self._lossy if lossy_ok else ()))
        return self._cheapest(x, site, position, reason, names, taken)

    def _forced(self, x: torch.Tensor, site: Site, position: int) -> tuple[str | None, str]:
        decision = self._plan.decisions.get(position) if self._plan else None
        if decision is not None and decision.codec is not None:
            return decision.codec, "the plan says so"
        if site.codec is not None:
            return site.codec, "forced for this module"
        option = self._config.codec
        if isinstance(option, dict):
            for key in (x.dtype, str(x.dtype), dtype_name(x.dtype)):
                if key in option:
                    return option[key], "forced for this dtype"
        if isinstance(option, str) and option != "auto":
            return option, "forced"
        return None, ""

    def _admissible(self, name: str, x: torch.Tensor, *, lossy_ok: bool) -> tuple[str | None, str]:
        codec = get_codec(name)
        if not codec.supports(x.dtype, x.device.type):
            return None, f"{name} does not take this dtype; "
        if not codec.lossless and not lossy_ok:
            return None, f"{name} is lossy and this tensor must come back exactly; "
        return name, ""

    def _cheapest(
        self,
        x: torch.Tensor,
        site: Site,
        position: int,
        reason: str,
        names: tuple[str, ...],
        taken: TensorProfile | None,
    ) -> Explanation:
        if taken is None:  # a codec was named that does not take this tensor
            taken = LateProfile(x).get() if _is_far(x) else profile(x)
        if taken is None:
            return Explanation(position, site, None, (), "raw", reason + EARLY)
        times, price = _times(x.device.type)
        candidates = sorted(
            (
                predict(name, taken, times[name], price)
                for name in names
                if name == KEEP or get_codec(name).supports(x.dtype, x.device.type)
            ),
            key=lambda c: c.cost_s,
        )
        best, reason = candidates[0], reason + "lowest predicted cost"
        stay = next((c for c in candidates if c.codec == KEEP), None)
        if stay is not None and best.cost_s > (1 - MARGIN) * stay.cost_s:
            best, reason = stay, f"nothing pays by {MARGIN:.0%}"
        return Explanation(position, site, taken, tuple(candidates), best.codec, reason)


@cache
def _times(kind: str) -> tuple[Mapping[str, Times], float]:
    # By codec, as measured on this machine if it was calibrated; and the price of a byte.
    rates, price = RATES[kind]
    measured = stored(kind)
    return (rates if measured is None else {**rates, **measured.times}), price


def _is_far(x: torch.Tensor) -> bool:
    # Whether its values are in memory that the host can only read by waiting.
    return x.is_cuda
