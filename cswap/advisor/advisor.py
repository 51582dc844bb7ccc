"""Chooses a codec per tensor: profile it, price the candidates, take the cheapest.

Note [when a choice is made again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The advisor remembers its choice per call site. It samples the values again after `RESAMPLE_EVERY`
uses, later after up to `MOST_USES`, or when encodings come out larger or smaller than after the
last sample. It chooses again, from the last sample, when prices or measured times have moved. At
all other times a choice is one look-up in a table. The advisor leaves a codec for another only if
that is cheaper by `HYSTERESIS`, so that noise does not make it switch back and forth.

Note [a choice is for sizes that are close]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Sequences have ever new lengths. A choice for each would take a sample and a comparison of all
codecs, a millisecond for each tensor, and be remembered for nothing. So tensors of a call site
share a choice if their sizes have the same class (`rough_size`: four for each power of two). A
user's own function for ``codec`` is asked at each size, since it may look at that.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Final

from cswap.advisor import lossy_rules, options
from cswap.advisor.call_site import Site
from cswap.advisor.candidates import RAW, LosslessCandidates, LossyCandidates
from cswap.advisor.cheapest import MARGIN, cheapest
from cswap.advisor.cost import candidate
from cswap.advisor.live_costs import KEEP, REMAT, UNREAD, LiveCosts
from cswap.advisor.lossy_fallback import Milder
from cswap.advisor.named_codec import AUTO, NamedCodecs
from cswap.advisor.pricing import make_pricing, static_codec
from cswap.advisor.rates import HOOKS_S, LINK_BYTES_PER_S
from cswap.advisor.site_history import Advice, Explanation, SiteMemory
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec
from cswap.codecs.tolerance import EXACT
from cswap.profiler import LateProfile, profile
from cswap.ranks import must_agree
from cswap.recent import Recent, rough_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from cswap.advisor.candidates import FallBack
    from cswap.advisor.site_history import Learner
    from cswap.config import SwapConfig
    from cswap.schema.plan import Plan
    from cswap.schema.tensor import TensorProfile

MAX_SITES: Final = 1 << 13
"""Call sites remembered, each once for each size class of its tensors."""

EARLY: Final = "its values are not known yet"
"""Reason for a choice made before a GPU's sample has arrived."""

_BEFORE_PROFILE: Final = ("bitpack", "zvc", RAW)
"""Until a tensor's profile has arrived, the first of these codecs that takes it encodes it: they
are fast and never enlarge a tensor by much."""

_SiteKey = tuple[int, str, "torch.dtype", int, int, str | None]


class Advisor:
    """Chooses codecs. Thread-safe.

    Attributes:
        may_use_lossy: whether the options admit a lossy codec for any tensor at all.
        milder: lossy codecs that the accuracy guard has forbidden.
    """

    def __init__(
        self,
        config: SwapConfig,
        plan: Plan | None,
        fall_back: FallBack | None = None,
    ) -> None:
        """An advisor that knows no call site yet.

        Args:
            config: parsed options.
            plan: that an engine follows.
            fall_back: counts and logs a failure, its reason and the way taken instead; None: nobody
                does.

        Raises:
            ConfigError: the options contradict each other.
        """
        options.check(config, plan)
        self._config, self._lossless = config, LosslessCandidates(fall_back)
        self._pricing = make_pricing(config.policy)
        self.may_use_lossy = options.may_use_lossy(config, plan)
        self.milder = Milder()
        self._named = NamedCodecs(config, static_codec(config.policy), self.milder)
        self._lock = threading.Lock()
        self._sites: Recent[_SiteKey, SiteMemory] = Recent(MAX_SITES)
        self._used: deque[SiteMemory] = deque(maxlen=MAX_SITES)
        self._recomputed: Recent[tuple[int, str, int], Explanation] = Recent(MAX_SITES)
        self._epoch = 0
        self._costs: dict[str, LiveCosts] = {}  # by kind of device

    def tolerance_of(self, tensor: torch.Tensor, site: Site) -> int:
        """How large an error this tensor may get, by the options and by its role."""
        return lossy_rules.tolerance_of(tensor, site) if self.may_use_lossy else EXACT

    @cached_property
    def _lossy(self) -> LossyCandidates:
        return LossyCandidates(self._config.lossy)

    def forget_sites(self) -> None:
        """Know no call site from here on: a plan is no longer followed."""
        with self._lock:
            for memory in self._sites.values():
                memory.stale = True  # an engine may remember its advice
            self._sites.clear()

    def begin_epoch(self, epochs: int) -> None:
        """The next of ``epochs`` epochs begins; it matters to ``policy="cswap+"`` only."""
        with self._lock:
            self._epoch += 1
            self._pricing.begin_epoch(self._epoch, epochs)
            for costs in tuple(self._costs.values()):
                costs.version += 1

    def begin_step(self, exposed_s: float) -> None:
        """A step begins: fit prices to the steps before.

        Args:
            exposed_s: seconds that computation has waited for swaps since the first step.
        """
        now_s = time.perf_counter()
        with self._lock:
            used = [*self._used]
            self._used.clear()
            for costs in tuple(self._costs.values()):
                if costs.begin_step(now_s, exposed_s):
                    costs.look_back(used)

    def choose(
        self,
        x: torch.Tensor,
        site: Site,
        position: int,
        *,
        tolerance: int,
        may_keep: bool,
        fresh: bool = False,
        planned: str | None = None,
    ) -> Advice:
        """Choose for x [n], flat, saved at this call site and position of the step.

        Args:
            x: the values.
            site: the call site.
            position: number of the saved tensor in the step.
            tolerance: that a codec may need (`cswap.codecs.tolerance`).
            may_keep: whether the tensor may stay in place, if no codec is worth its time.
            fresh: whether to sample the values anew; many steps have passed since the last call.
            planned: codec that a plan names for the tensor.

        Raises:
            ConfigError: the user's own function named a codec that does not exist.
        """
        key = (position, site.scope, x.dtype, self._class_of(x), tolerance, planned or site.codec)
        kind = x.device.type
        costs = self._costs.get(kind) or self._costs_on(kind)
        with self._lock:
            memory = self._sites.get(key)
            if memory is not None:
                self._used.append(memory)
                memory.uses += 1
                memory.stale = memory.stale or fresh
                if self._is_settled(memory, costs, site.kind):
                    return memory.advice or Advice(memory.codec, memory, costs)
        taken, sampled = None, True
        if memory is not None and not self._needs_sample(memory):
            taken = memory.explanation.profile_for(x.nbytes)
            sampled = taken is None
        elif _is_far(x) and self._needs_profile(x, site, planned):
            pending = LateProfile(x) if memory is None or not memory.pending else memory.pending
            taken = pending.get() if self._may_adapt() else pending.wait()
            if taken is None:
                return self._wait_for(pending, key, memory, x, costs)
        explanation = self._decide(
            x,
            site,
            position,
            taken,
            memory,
            tolerance=tolerance,
            may_keep=may_keep,
            planned=planned,
        )
        return self._remember(key, memory, explanation, costs, sampled=sampled)

    def stands(self, advice: Advice, kind: str) -> bool:
        """Whether an advice is that of the next tensor of its call site, too.

        If it is used, `has_used` is to be told.

        Args:
            advice: that `choose` gave for the last one.
            kind: of module.
        """
        memory, costs, codec = advice.memory, advice.costs, advice.codec
        with self._lock:
            if memory.advice is not advice:
                return False
            memory.uses += 1
            # First without calls, since this is asked for each tensor that leaves.
            found = (
                memory.uses <= memory.good_for
                and memory.version == costs.version
                and not memory.stale
                and memory.pending is None
                and (codec is None or codec.lossless)
            ) or self._is_settled(memory, costs, kind)
            memory.uses -= 1
        return found

    def has_used(self, advices: Iterable[Advice]) -> None:
        """Count one more use of each of these advices, which stood."""
        with self._lock:
            for advice in advices:
                advice.memory.uses += 1
                self._used.append(advice.memory)

    def pays_again(
        self, site: Site, position: int, nbytes: int, device_s: float, kind: str
    ) -> bool:
        """Whether to compute a saved tensor again and hold no bytes, at the price of a byte.

        Args:
            site: the call site.
            position: number of the saved tensor in the step.
            nbytes: bytes of the tensor.
            device_s: seconds that it takes.
            kind: kind of device: "cpu" or "cuda".
        """
        price = self._costs_on(kind).price_s_per_byte
        stay = candidate(KEEP, nbytes, 1.0, 0.0, price)
        again = candidate(REMAT, nbytes, float(nbytes), device_s + HOOKS_S[kind], price)
        key = position, site.scope, rough_size(nbytes)
        if again.cost_s > (1 - MARGIN) * stay.cost_s:
            with self._lock:
                self._recomputed.pop(key)
            return False
        with self._lock:
            self._recomputed[key] = Explanation(
                position, site, None, (again, stay), REMAT, "computed again", price
            )
        return True

    def unread(self, site: Site, position: int, nbytes: int) -> None:
        """Backward does not read a saved tensor: it is not held from the next step on.

        Args:
            site: the call site.
            position: number of the saved tensor in the step.
            nbytes: bytes of the tensor.
        """
        with self._lock:
            self._recomputed[position, site.scope, rough_size(nbytes)] = _unasked(
                position, site, None, UNREAD, "backward reads only its sizes", nbytes
            )

    def _class_of(self, x: torch.Tensor) -> int:
        # Sizes that share a choice: see Note [a choice is for sizes that are close].
        return x.numel() if callable(self._config.codec) else rough_size(x.numel())

    def _is_settled(self, memory: SiteMemory, costs: Learner, kind: str) -> bool:
        return (
            memory.pending is None
            and (
                memory.codec is None
                or memory.codec.lossless
                or self.milder.allows(kind, memory.codec.name)
            )
            and memory.version == costs.version
            and not self._needs_sample(memory)
        )

    def _needs_sample(self, memory: SiteMemory) -> bool:
        if self._pricing.per_epoch:
            return memory.epoch != self._epoch
        old = memory.uses > memory.sample_every and not memory.fixed
        return old or memory.stale or memory.pending is not None

    def _costs_on(self, kind: str) -> LiveCosts:
        found = self._costs.get(kind)
        if found is None:
            limit = self._config.host_limit
            assert limit is None or isinstance(limit, int)
            # A link's price follows its time.
            patience = options.patience_of(self._config) if LINK_BYTES_PER_S[kind] is None else 1.0
            costs = LiveCosts(kind, limit, adapt=self._may_adapt(), patience=patience)
            found = self._costs.setdefault(kind, costs)
        return found

    def _remember(
        self,
        key: _SiteKey,
        memory: SiteMemory | None,
        explanation: Explanation,
        costs: LiveCosts,
        *,
        sampled: bool,
    ) -> Advice:
        codec = None if explanation.codec == KEEP else get_codec(explanation.codec)
        with self._lock:
            if memory is None:
                memory = self._sites[key] = SiteMemory(explanation, codec)
                self._used.append(memory)
            memory.decide(explanation, codec, costs.version)
            # No profile was asked for, and none is awaited.
            memory.fixed = explanation.profile is None and not explanation.reason.endswith(EARLY)
            samples_again = not (memory.fixed or self._pricing.per_epoch)
            memory.good_for = memory.sample_every if samples_again else math.inf
            if sampled:
                memory.sampled()
                memory.epoch = self._epoch
            memory.advice = Advice(codec, memory, costs)
        return memory.advice

    def _wait_for(
        self,
        pending: LateProfile,
        key: _SiteKey,
        memory: SiteMemory | None,
        x: torch.Tensor,
        costs: LiveCosts,
    ) -> Advice:
        # Until the sample has arrived, the last choice stands; at first, a cheap codec.
        if memory is None:
            codec = next(
                c for c in map(get_codec, _BEFORE_PROFILE) if takes(c, x.dtype, x.device.type)
            )
            position, scope = key[:2]
            explanation = _unasked(position, Site(scope), None, codec.name, EARLY, x.nbytes)
            memory = SiteMemory(explanation, codec)
            with self._lock:
                self._sites[key] = memory
        memory.pending = pending
        return Advice(memory.codec, memory, costs)

    def _needs_profile(self, x: torch.Tensor, site: Site, planned: str | None) -> bool:
        return self._named.name(x, site, planned)[0] in AUTO

    def explain(self) -> list[Explanation]:
        """The last decision of every call site, in the order of the step."""
        with self._lock:
            found = [memory.explained() for memory in self._sites.values()]
            # A tensor that is held no more has had another decision before.
            found = [e for e in found if _key(e) not in self._recomputed]
            found += self._recomputed.values()
        return sorted(found, key=lambda e: e.position)

    def _decide(
        self,
        x: torch.Tensor,
        site: Site,
        position: int,
        taken: TensorProfile | None,
        memory: SiteMemory | None,
        *,
        tolerance: int,
        may_keep: bool,
        planned: str | None,
    ) -> Explanation:
        forced, reason = self._named.name(x, site, planned)
        if callable(self._config.codec) and forced is None:
            taken = taken or profile(x)
            forced, reason = self._by_function(taken), "the codec function said so"
            if forced == KEEP:
                return _unasked(position, site, taken, KEEP, reason, x.nbytes)
        if forced not in AUTO:
            name, why = self._named.admissible(str(forced), x, site.kind, tolerance=tolerance)
            if name is not None:
                return _unasked(position, site, taken, name, reason, x.nbytes)
            reason = why
        else:
            reason = ""
        if taken is None:
            taken = self._late_profile(x) if _is_far(x) else profile(x)
        if taken is None:  # a codec was named that does not take this tensor
            return _unasked(position, site, None, RAW, reason + EARLY, x.nbytes)
        stay = (KEEP, RAW) if may_keep else (RAW,)
        lossy = self.milder.among(self._lossy.of(tolerance, taken), x, site.kind)
        names = (*stay, *self._lossless.on(x.device.type), *lossy)
        return self._cheapest(x, site, position, reason, names, taken, memory, tolerance=tolerance)

    def _by_function(self, taken: TensorProfile) -> str:
        function = self._config.codec
        assert callable(function)  # the caller has looked
        try:
            return function(taken)
        except Exception as error:
            name = getattr(function, "__qualname__", repr(function))
            raise RuntimeError(f"codec={name}: {type(error).__name__}: {error}") from error

    def _may_adapt(self) -> bool:
        # Times, and the order in which encodes finish, differ from run to run and from rank to
        # rank. Deterministic runs, and ranks with lossy codecs, choose by neither.
        return not must_agree(lossy=self.may_use_lossy)

    def _late_profile(self, x: torch.Tensor) -> TensorProfile | None:
        pending = LateProfile(x)
        return pending.get() if self._may_adapt() else pending.wait()

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
        tolerance: int,
    ) -> Explanation:
        costs = self._costs_on(x.device.type)
        quotes = [
            quote
            for name in names
            if name == KEEP or takes(get_codec(name), x.dtype, x.device.type)
            if (quote := costs.quote(name, taken, memory)) is not None
        ]
        priced = self._pricing.price(x, quotes, costs, tolerance=tolerance)
        candidates = tuple(sorted(priced, key=lambda c: c.cost_s))
        used = None if memory is None or memory.pending else memory.explanation.codec
        best, why = cheapest(candidates, self._pricing.reason, used)
        return Explanation(
            position,
            site,
            taken,
            candidates,
            best.codec,
            reason + why,
            costs.price_s_per_byte,
            hooks_s=HOOKS_S[x.device.type],
        )


def _is_far(x: torch.Tensor) -> bool:
    # Whether the host would have to wait to read the values.
    return x.is_cuda


def _unasked(
    position: int,
    site: Site,
    taken: TensorProfile | None,
    codec: str,
    reason: str,
    nbytes: int,
) -> Explanation:
    # A decision without a choice of codecs.
    return Explanation(position, site, taken, (), codec, reason, known_nbytes=nbytes)


def _key(found: Explanation) -> tuple[int, str, int]:
    # Of a tensor that may be held no more.
    return found.position, found.site.scope, rough_size(found.nbytes or 0)
