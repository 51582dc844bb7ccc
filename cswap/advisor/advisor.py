"""Decides per tensor: profile, price the candidates, take the cheapest. Remembers per call site.

Note [when a choice is made again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
After `RESAMPLE_EVERY` uses, or when encodings come out larger or smaller than after the last
sample, the site's values are sampled again. When prices or measured times have moved, the choice
is made again from the sample there is. In between it costs a look into a dict. A codec is left for
another only if that is cheaper by `HYSTERESIS`: noise does not make choices flap.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from cswap.advisor import background_calibration as background
from cswap.advisor import lossy_rules as rules
from cswap.advisor.call_site import Site
from cswap.advisor.explore import trial_at
from cswap.advisor.live_costs import KEEP, Market
from cswap.advisor.lossy_fallback import Milder
from cswap.advisor.pricing import LOSSLESS, make_policy, static_codec
from cswap.advisor.site_history import RESAMPLE_EVERY, Explanation, SiteMemory
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec
from cswap.profiler import LateProfile, profile
from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    from cswap.advisor.cost import Candidate
    from cswap.codecs.base import Codec
    from cswap.config import SwapConfig
    from cswap.schema.plan import Plan
    from cswap.schema.tensor import TensorProfile

MAX_SITES: Final = 1 << 14

MARGIN: Final = 0.05
"""Share by which a codec must beat leaving the tensor alone."""

HYSTERESIS: Final = 0.05
"""Share by which a codec must beat the one in use."""

EARLY: Final = "its values are not known yet"
"""Reason for a choice made before a GPU's sample has arrived."""

_CHEAP: Final = ("bitpack", "zvc", "raw")
"""The first of these that takes a tensor encodes it until it has been profiled."""

_SiteKey = tuple[int, str, "torch.dtype", int, bool]


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do with one tensor, and where to say how that went.

    Attributes:
        codec: to encode with; None: leave the tensor where it is.
    """

    codec: Codec | None
    _memory: SiteMemory
    _market: Market

    @property
    def learns(self) -> bool:
        """Whether there was a choice, of which the outcome is worth a note."""
        return bool(self._memory.explanation.candidates)

    def note_encoded(self, codec: str, raw_nbytes: int, nbytes: int) -> None:
        """The tensor was encoded; ``codec`` may be another than the one advised."""
        self._memory.note_encoded(codec, raw_nbytes, nbytes, learn=self._market.adapts)

    def note_round_trip(self, codec: str, device_s: float) -> None:
        """It was decoded, too; seconds of both."""
        self._memory.note_round_trip(codec, device_s)
        taken = self._memory.explanation.profile
        if taken is not None:
            self._market.observe(codec, taken, device_s)


class Advisor:
    """Chooses codecs. Thread-safe.

    Attributes:
        may_use_lossy: whether the options admit a lossy codec for any tensor at all.
        milder: what the accuracy guard has forbidden.
    """

    def __init__(self, config: SwapConfig, plan: Plan | None) -> None:
        """Args: config: parsed options; plan: decisions that come before all others.

        Raises:
            ConfigError: the options do not fit together.
        """
        rules.check(config, plan)
        self._config = config
        self._plan = plan
        self._policy = make_policy(config.policy)
        self._static = static_codec(config.policy)
        self._lossy = rules.lossy_candidates(config.lossy)
        self.may_use_lossy = rules.may_use_lossy(config, plan)
        self.milder = Milder()
        self._lock = threading.Lock()
        self._sites: dict[_SiteKey, SiteMemory] = {}
        self._used: list[SiteMemory] = []
        self._epoch = 0
        self._markets: dict[str, Market] = {}

    def may_be_lossy(self, tensor: torch.Tensor, site: Site) -> bool:
        """Whether lossy codecs are allowed for this tensor, by the options and by its role."""
        return self.may_use_lossy and rules.may_be_lossy(tensor, site)

    def forget_plan(self) -> None:
        """Decide alone from here on: the steps are no longer those that the plan was made for."""
        self._plan = None
        with self._lock:
            self._sites.clear()

    def begin_epoch(self, epochs: int) -> None:
        """An epoch ends, and the next of ``epochs`` begins; only ``policy="cswap+"`` cares."""
        with self._lock:
            self._epoch += 1
            self._policy.begin_epoch(self._epoch, epochs)
            for market in tuple(self._markets.values()):
                market.version += 1

    def begin_step(self, exposed_s: float) -> None:
        """A step begins; computation has waited so many seconds for swaps since the first.

        Prices follow the steps before, and now and then a codec is tried (explore.py).
        """
        now_s = time.perf_counter()
        with self._lock:
            used, self._used = self._used, []
            step_s = None
            for market in tuple(self._markets.values()):
                if market.begin_step(now_s, exposed_s):
                    step_s = market.look_back(used) or step_s
            if step_s is not None and self._policy.explores and _may_adapt():
                trial_at(used, step_s, self._markets)

    def choose(
        self, x: torch.Tensor, site: Site, position: int, *, lossy_ok: bool, may_keep: bool
    ) -> Advice:
        """What to do with x [n], flat, saved at this site and position of the step.

        Args:
            x: the values.
            site: where they were saved.
            position: in the step.
            lossy_ok: whether a lossy codec may be chosen.
            may_keep: whether the answer may be to leave it where it is, since nothing pays.

        Raises:
            ConfigError: the user's own function named a codec that does not exist.
        """
        key = (position, site.scope, x.dtype, x.numel(), lossy_ok)
        market = self._market(x.device.type)
        with self._lock:
            memory = self._sites.get(key)
            if memory is not None:
                self._used.append(memory)
                memory.uses += 1
                if memory.trial is not None:
                    codec, memory.trial = memory.trial, None
                    return Advice(codec, memory, market)
                if self._is_settled(memory, market, site.kind):
                    return Advice(memory.codec, memory, market)
        taken = None
        if memory is not None and not self._needs_sample(memory):
            taken = memory.explanation.profile
        elif _is_far(x) and self._needs_profile(x, site, position):
            pending = LateProfile(x) if memory is None or not memory.pending else memory.pending
            taken = pending.get() if _may_adapt() else pending.wait()
            if taken is None:
                return self._wait_for(pending, key, memory, x, market)
        explanation = self._decide(
            x, site, position, taken, memory, lossy_ok=lossy_ok, may_keep=may_keep
        )
        return self._remember(key, memory, explanation, market, sampled=taken is None or _is_far(x))

    def _is_settled(self, memory: SiteMemory, market: Market, kind: str) -> bool:
        return (
            memory.pending is None
            and (memory.codec is None or self.milder.allows(kind, memory.codec.name))
            and memory.version == market.version
            and not self._needs_sample(memory)
        )

    def _needs_sample(self, memory: SiteMemory) -> bool:
        if self._policy.per_epoch:
            return memory.epoch != self._epoch
        return memory.uses > RESAMPLE_EVERY or memory.stale or memory.pending is not None

    def _market(self, kind: str) -> Market:
        found = self._markets.get(kind)
        if found is None:
            limit = self._config.host_limit
            assert limit is None or isinstance(limit, int)
            found = self._markets.setdefault(kind, Market(kind, limit, adapt=_may_adapt()))
            background.start_once(kind)
        return found

    def _remember(
        self,
        key: _SiteKey,
        memory: SiteMemory | None,
        explanation: Explanation,
        market: Market,
        *,
        sampled: bool,
    ) -> Advice:
        codec = None if explanation.codec == KEEP else get_codec(explanation.codec)
        with self._lock:
            if memory is None:
                if len(self._sites) >= MAX_SITES:
                    self._sites.clear()
                memory = self._sites[key] = SiteMemory(explanation, codec)
                self._used.append(memory)
            memory.decide(explanation, codec, market.version)
            if sampled:
                memory.sampled()
                memory.epoch = self._epoch
        return Advice(codec, memory, market)

    def _wait_for(
        self,
        pending: LateProfile,
        key: _SiteKey,
        memory: SiteMemory | None,
        x: torch.Tensor,
        market: Market,
    ) -> Advice:
        # Until the sample has arrived: as before, or what is cheap and never much of a loss.
        if memory is None:
            codec = next(c for c in map(get_codec, _CHEAP) if takes(c, x.dtype, x.device.type))
            position, scope = key[:2]
            explanation = Explanation(position, Site(scope), None, (), codec.name, EARLY)
            memory = SiteMemory(explanation, codec)
            with self._lock:
                self._sites[key] = memory
        memory.pending = pending
        return Advice(memory.codec, memory, market)

    def _needs_profile(self, x: torch.Tensor, site: Site, position: int) -> bool:
        forced, _ = self._forced(x, site, position)
        return forced in (None, "auto")

    def explain(self) -> list[Explanation]:
        """The latest decision of every call site, in the order of the step."""
        with self._lock:
            found = [memory.explained() for memory in self._sites.values()]
        return sorted(found, key=lambda e: e.position)

    def _decide(
        self,
        x: torch.Tensor,
        site: Site,
        position: int,
        taken: TensorProfile | None,
        memory: SiteMemory | None,
        *,
        lossy_ok: bool,
        may_keep: bool,
    ) -> Explanation:
        forced, reason = self._forced(x, site, position)
        if callable(self._config.codec) and forced is None:
            taken = taken or profile(x)
            forced, reason = self._config.codec(taken), "the codec function said so"
        if forced not in (None, "auto"):
            name, why = self._admissible(str(forced), x, site.kind, lossy_ok=lossy_ok)
            if name is not None:
                return Explanation(position, site, taken, (), name, reason)
            reason = why
        else:
            reason = ""
        if taken is None:
            taken = self._late_profile(x) if _is_far(x) else profile(x)
        if taken is None:  # a codec was named that does not take this tensor
            return Explanation(position, site, None, (), "raw", reason + EARLY)
        stay = (KEEP, "raw") if may_keep else ("raw",)
        lossy = self.milder.among(self._lossy, x, site.kind) if lossy_ok else ()
        names = (*stay, *LOSSLESS, *lossy)
        return self._cheapest(x, site, position, reason, names, taken, memory, lossy_ok=lossy_ok)

    @staticmethod
    def _late_profile(x: torch.Tensor) -> TensorProfile | None:
        pending = LateProfile(x)
        return pending.get() if _may_adapt() else pending.wait()

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
        return self._static, "policy static"

    def _admissible(
        self, name: str, x: torch.Tensor, kind: str, *, lossy_ok: bool
    ) -> tuple[str | None, str]:
        milder = self.milder.instead(name, x, kind)
        if milder is None:
            return None, f"{name} harmed gradients; "
        name, codec = milder, get_codec(milder)
        if not takes(codec, x.dtype, x.device.type):
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
        taken: TensorProfile,
        memory: SiteMemory | None,
        *,
        lossy_ok: bool,
    ) -> Explanation:
        market = self._market(x.device.type)
        quotes = [
            market.quote(name, taken, memory)
            for name in names
            if name == KEEP or takes(get_codec(name), x.dtype, x.device.type)
        ]
        candidates = tuple(
            sorted(self._policy.price(x, quotes, market, lossy_ok=lossy_ok), key=lambda c: c.cost_s)
        )
        best, why = candidates[0], self._policy.reason
        stay = next((c for c in candidates if c.codec == KEEP), None)
        if stay is not None and best.cost_s > (1 - MARGIN) * stay.cost_s:
            best, why = stay, f"nothing pays by {MARGIN:.0%}"
        best, why = _unless_better(best, why, candidates, memory)
        price = market.price_s_per_byte
        return Explanation(position, site, taken, candidates, best.codec, reason + why, price)


def _unless_better(
    best: Candidate, why: str, candidates: tuple[Candidate, ...], memory: SiteMemory | None
) -> tuple[Candidate, str]:
    # What is in use stays in use unless the best is clearly better.
    used = None if memory is None or memory.pending else memory.explanation.codec
    current = next((c for c in candidates if c.codec == used), None)
    if current is None or current.codec == best.codec:
        return best, why
    margin = MARGIN if best.codec == KEEP else 0.0  # the best may be what nothing beats by that
    if (1 - HYSTERESIS) * current.cost_s < (1 - margin) * best.cost_s:
        return current, f"no other is cheaper by {HYSTERESIS:.0%}"
    return best, why


def _may_adapt() -> bool:
    # Times differ from run to run, and so does what happens to be done when: who wants equal runs
    # gets choices that depend on neither.
    return not torch.are_deterministic_algorithms_enabled()


def _is_far(x: torch.Tensor) -> bool:
    # Whether its values are in memory that the host can only read by waiting.
    return x.is_cuda
