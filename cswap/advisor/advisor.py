"""Chooses a codec per tensor: profile it, price the candidates, take the cheapest.

Note [when a choice is made again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The advisor remembers its choice per call site. It samples the values and chooses again in a step
in which the engine looks at every tensor (engine/order/looks.py), by the prices and the measured
times of then, or when encodings come out larger or smaller than they were, or than was foretold. At
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
from functools import cached_property
from typing import TYPE_CHECKING, Final

from cswap.advisor import cswap_plus_pricing, lossy_rules, options
from cswap.advisor.candidates import HALF_LEAST, RAW, lossy_by_tolerance
from cswap.advisor.cost import candidate
from cswap.advisor.live_costs import KEEP, MARGIN, REMAT, UNREAD, LiveCosts, cheapest
from cswap.advisor.lossy_fallback import Milder
from cswap.advisor.named_codec import admissible, named_codec
from cswap.advisor.rates import HOOKS_S, LINK_BYTES_PER_S
from cswap.advisor.site_history import STALE, Advice, Explanation, SiteMemory
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec
from cswap.codecs.tolerance import EXACT, FINE
from cswap.profiler import LateProfile, profile
from cswap.ranks import must_agree
from cswap.recent import Recent, rough_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from cswap.advisor.call_site import Site
    from cswap.advisor.candidates import FallBack
    from cswap.advisor.cost import Candidate
    from cswap.codecs.base import Codec
    from cswap.config import SwapConfig
    from cswap.schema.plan import Plan
    from cswap.schema.tensor import TensorProfile

MAX_SITES: Final = 1 << 13
"""Call sites remembered, each once for each size class of its tensors."""

CHEAPEST: Final = "lowest predicted cost"
"""Reason for the cheapest candidate."""

EARLY: Final = "its values are not known yet"
"""Reason of tensors that go raw before a GPU's sample has arrived."""

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
        self._config, self._fall_back = config, fall_back
        self._paper = cswap_plus_pricing.CswapPlusPricing() if config.policy == "cswap+" else None
        self.may_use_lossy = options.may_use_lossy(config, plan)
        self.milder = Milder()
        self._lock = threading.Lock()
        self._sites: Recent[_SiteKey, SiteMemory] = Recent(MAX_SITES)
        self._recomputed: Recent[tuple[int, str, int], Explanation] = Recent(MAX_SITES)
        self._step = self._look = 0
        self._round = 0  # of samples
        self._costs: dict[str, LiveCosts] = {}  # by kind of device

    def tolerance_of(self, tensor: torch.Tensor, site: Site) -> int:
        """How large an error this tensor may get, by the options and by its role."""
        return lossy_rules.tolerance_of(tensor, site) if self.may_use_lossy else EXACT

    @cached_property
    def _lossy(self) -> dict[int, tuple[str, ...]]:
        return lossy_by_tolerance(self._config.lossy)

    def forget_sites(self) -> None:
        """Know no call site from here on: a plan is no longer followed."""
        with self._lock:
            for memory in self._sites.values():
                memory.sampled = STALE  # an engine may remember its advice
            self._sites.clear()

    def begin_epoch(self, epochs: int) -> None:
        """The next of ``epochs`` epochs begins; it matters to ``policy="cswap+"`` only."""
        if self._paper is not None:
            with self._lock:
                self._paper.begin_epoch(epochs)
                self._round += 1

    def begin_step(self, exposed_s: float, look: int = 0) -> None:
        """A step begins.

        Args:
            exposed_s: seconds that computation has waited for swaps since the first step.
            look: number of the last step in which tensors are looked at. In each such step, prices
                and times follow the steps before, and all values are sampled again: those of
                ``policy="cswap+"`` once per epoch instead.
        """
        now_s = time.perf_counter()
        with self._lock:
            looks = look != self._look
            for costs in tuple(self._costs.values()):
                costs.begin_step(now_s, exposed_s)
                if looks:
                    costs.look_back(self._chosen_from(costs))
            self._step += 1
            self._round += looks and self._paper is None
            self._look = look

    def _chosen_from(self, costs: LiveCosts) -> Iterator[tuple[Candidate, ...]]:
        # Of the tensors of the step that has ended, on that kind of device.
        for memory in self._sites.values():
            if memory.used_in == self._step and memory.advice.costs is costs:
                yield memory.advice.candidates

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
        costs = self._costs.get(x.device.type) or self._costs_on(x.device.type)
        with self._lock:
            memory = self._sites.get(key)
            if memory is not None:
                if fresh:
                    memory.sampled = STALE
                if self.stands(memory.advice, site.kind):
                    return memory.advice
        codec, why = self._named(x, site, planned, tolerance)
        if codec is not None:
            found = _unasked(position, site, None, codec, why, x.nbytes)
            return self._remember(key, memory, found, costs, sampled=math.inf).advice
        taken = self._sample(x, memory)
        if isinstance(taken, LateProfile):  # until it has arrived, the last choice stands
            if memory is None or not self._allows(memory.advice.codec, site.kind):
                found = _unasked(position, site, None, RAW, why + EARLY, x.nbytes)
                memory = self._remember(key, memory, found, costs, sampled=STALE)
            memory.pending, memory.sampled = taken, STALE
            return memory.advice
        found = self._decide(
            x, site, position, taken, memory, why, tolerance=tolerance, may_keep=may_keep
        )
        return self._remember(key, memory, found, costs, sampled=self._round).advice

    def stands(self, advice: Advice, kind: str) -> bool:
        """Whether an advice is that of the next tensor of its call site, too, which takes it then.

        Args:
            advice: that `choose` gave for the last one.
            kind: of module.
        """
        # Without calls of Python, where it can be: it is asked for each tensor that leaves.
        memory, codec = advice.memory, advice.codec
        memory.used_in = self._step
        return (
            memory.advice is advice
            and memory.sampled >= self._round
            and (codec is None or codec.lossless or self._allows(codec, kind))
        )

    def _allows(self, codec: Codec | None, kind: str) -> bool:
        return codec is None or codec.lossless or self.milder.allows(kind, codec.name)

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

    def _costs_on(self, kind: str) -> LiveCosts:
        found = self._costs.get(kind)
        if found is None:
            limit = self._config.host_limit
            assert limit is None or isinstance(limit, int)
            # A link's price follows its time.
            patience = options.patience_of(self._config) if LINK_BYTES_PER_S[kind] is None else 1.0
            costs = LiveCosts(
                kind,
                limit,
                adapt=self._may_adapt(),
                patience=patience,
                fall_back=self._fall_back,
            )
            found = self._costs.setdefault(kind, costs)
        return found

    def _named(
        self, x: torch.Tensor, site: Site, planned: str | None, tolerance: int
    ) -> tuple[str | None, str]:
        # The codec that somebody has named, and who; None: the advisor chooses. Then why the named
        # codec cannot serve, if there is one.
        name, why = named_codec(self._config, x, site, planned)
        if name is None:
            return None, ""
        codec, refusal = admissible(name, x, site.kind, self.milder, tolerance=tolerance)
        if codec is None and options.static_codec(self._config.policy) is not None:
            return RAW, f"{refusal}policy {self._config.policy}"
        return codec, refusal or why

    def _sample(self, x: torch.Tensor, memory: SiteMemory | None) -> TensorProfile | LateProfile:
        if not _is_far(x):
            return profile(x)
        late = LateProfile(x) if memory is None or memory.pending is None else memory.pending
        return (late.get() if self._may_adapt() else late.wait()) or late

    def _remember(
        self,
        key: _SiteKey,
        memory: SiteMemory | None,
        explanation: Explanation,
        costs: LiveCosts,
        *,
        sampled: float,
    ) -> SiteMemory:
        codec = None if explanation.codec == KEEP else get_codec(explanation.codec)
        with self._lock:
            if memory is None:
                memory = SiteMemory(explanation, used_in=self._step)
            memory.decide(explanation, codec, costs, sampled)
            self._sites[key] = memory
        return memory

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
        taken: TensorProfile,
        memory: SiteMemory | None,
        why: str,
        *,
        tolerance: int,
        may_keep: bool,
    ) -> Explanation:
        if callable(self._config.codec):
            name: str | None = self._by_function(taken)
            reason = "the codec function said so"
            if name not in (None, KEEP, "auto"):
                name, why = admissible(name, x, site.kind, self.milder, tolerance=tolerance)
            if name not in (None, "auto"):
                return _unasked(position, site, taken, name, reason, x.nbytes)
        costs, kind = self._costs_on(x.device.type), x.device.type
        stay = (KEEP, RAW) if may_keep else (RAW,)
        fits = tolerance != FINE or taken.amax >= HALF_LEAST
        lossy = self._lossy.get(tolerance, ()) if fits else ()
        lossy = self.milder.among(lossy, x, site.kind)
        factors = {} if memory is None else memory.ratio_factors()
        priced: Sequence[Candidate] = [
            quote
            for name in (*stay, *costs.lossless, *lossy)
            if name == KEEP or takes(get_codec(name), x.dtype, kind)
            if (quote := costs.quote(name, taken, factors.get(name, 1.0))) is not None
        ]
        reason = CHEAPEST
        if self._paper is not None:
            reason = cswap_plus_pricing.REASON
            priced = self._paper.price(x, taken, priced, costs, tolerance=tolerance)
        candidates = tuple(sorted(priced, key=lambda c: c.cost_s))
        best, reason = cheapest(candidates, reason, None if memory is None else memory.used)
        return Explanation(
            position,
            site,
            taken,
            candidates,
            best.codec,
            why + reason,
            costs.price_s_per_byte,
            hooks_s=HOOKS_S[kind],
        )

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
