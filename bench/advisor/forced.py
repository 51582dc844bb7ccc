"""`codec="auto"` against every codec forced, by the engine itself, in training on this CPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from torch.nn import functional

import cswap
from bench.advisor.truth import LOSSLESS
from cswap.advisor.live_costs import KEEP
from cswap.advisor.rates import DEFAULT_PRICE_S_PER_BYTE, HOOKS_S
from cswap.experiments.codecs.recorded import trained

if TYPE_CHECKING:
    from cswap.engine.engine import SwapEngine

WARM: Final = 6
"""Uncounted first steps per codec, in which kernels are compiled and the advisor learns."""


def run(model: str, *, steps: int, quick: bool) -> dict[str, dict[str, float]]:
    """Cost of a step per codec; tensors that the codec does not take go raw.

    Device seconds of encodes and decodes, bytes held, the cost of both and of the hooks, and the
    milliseconds of the step, which the cost does not use.

    Every codec trains the same model from the same state on the same batches; steps take turns.
    """
    nets, engines = {}, {}
    for codec in ("auto", *LOSSLESS):
        net, task = trained(model, quick=quick)
        nets[codec] = net
        policy = "auto" if codec == "auto" else f"static:{codec}"
        engines[codec] = cswap.install(net, policy=policy).engine
    before, total_s = {}, dict.fromkeys(nets, 0.0)
    staying = dict.fromkeys(nets, 0.0)
    for step in range(WARM + steps):
        inputs, targets = task.batch(0, step)
        for codec, net in nets.items():
            if step == WARM:
                before[codec] = _spent(engines[codec])
            start = time.perf_counter()
            functional.cross_entropy(net(inputs), targets).backward()
            net.zero_grad()
            if step >= WARM:
                total_s[codec] += time.perf_counter() - start
                staying[codec] += _staying_bytes(engines[codec])
    found = {}
    for codec, engine in engines.items():
        engine.synchronize()
        device_s, nbytes, swapped = (
            b - a for a, b in zip(before[codec], _spent(engine), strict=True)
        )
        held = (nbytes + staying[codec]) / steps
        hooks_s = HOOKS_S * swapped / steps
        cost_s = device_s / steps + hooks_s + DEFAULT_PRICE_S_PER_BYTE * held
        found[codec] = {
            "device_s": device_s / steps,
            "held_bytes": held,
            "hooks_s": hooks_s,
            "cost_s": cost_s,
            "step_ms": 1e3 * total_s[codec] / steps,
        }
    return found


def _spent(engine: SwapEngine) -> tuple[float, float, int]:
    stats = engine.stats
    device_s = sum(c.encode_s + c.decode_s for c in stats.by_codec.values())
    return device_s, float(stats.encoded_bytes), stats.swapped


def _staying_bytes(engine: SwapEngine) -> float:
    # Raw bytes of tensors that could have been swapped in this step but stayed.
    return sum(e.profile.nbytes for e in engine.explain() if e.codec == KEEP and e.profile)
