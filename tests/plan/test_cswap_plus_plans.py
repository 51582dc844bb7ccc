"""The policies `sc` and `cswap+`, by hand: which tensors are compressed, and by which codec."""

import numpy as np

from cswap.codecs.traits import CodecRate
from cswap.plan.hardware import Hardware
from cswap.plan.policies import cswap_plus, sc
from cswap.plan.policies.cswap_plus import swaps
from cswap.plan.policy_tools.problem import Problem
from cswap.plan.simulate import Simulator
from cswap.schema.trace import Trace, TraceOperator, TraceTensor

MB = 10**6
MACHINE = Hardware(
    "test",
    1 << 40,
    {},
    1e12,
    1e9,  # 1 MB takes 1 ms
    1e9,
    codecs={"zvc": CodecRate(1e10, 1e10, 0.0)},
)


def chain(sizes_mb, forward_ms, backward_ms, zeros):
    """Convolutions, each with an input of its own that is saved."""
    n = len(sizes_mb)
    tensors = [
        TraceTensor(
            size * MB,
            name=f"t{i}",
            shape=(4, size * MB // 16),
            saved=i,
            role="activation" if i else "input",
            profile={"zero_fraction": z},
            ratios={"zvc": 1 / (1 - z)} if z else {},
        )
        for i, (size, z) in enumerate(zip(sizes_mb, zeros, strict=True))
    ] + [TraceTensor(0, name="out")]
    operators = [
        TraceOperator(f"f{i}", "conv", "forward", forward_ms[i] / 1e3, (i,), (i + 1,))
        for i in range(n)
    ] + [
        TraceOperator(f"b{i}", "conv", "backward", backward_ms[i] / 1e3, (i,), ())
        for i in reversed(range(n))
    ]
    return Trace(tuple(operators), tuple(tensors), batch=4)


def codecs(trace, solve):
    made = solve(Problem(trace, MACHINE, 1 << 40))
    return [made.decisions[i].codec for i in sorted(made.decisions)]


def test_each_transfer_hides_behind_its_own_layer_only():
    trace = chain([4, 10, 6], [10, 3, 9], [5, 20, 8], [0, 0, 0])
    ways = swaps(Simulator(trace, MACHINE, 1 << 40), np.ones(3, bool))
    # Out: the operator that reads it last. Back: backward of the layer before, none before the
    # first one of backward.
    assert [round(1e3 * w.forward_s) for w in ways.values()] == [10, 3, 9]
    assert [round(1e3 * w.backward_s) for w in ways.values()] == [20, 8, 0]


def test_sc_compresses_everything_and_cswap_plus_only_what_pays():
    # The first is hidden, the second is not: 10 ms each way beyond 1 ms.
    trace = chain([4, 10], [10, 1], [1, 10], [0.5, 0.5])
    assert codecs(trace, sc.solve) == ["zvc", "zvc"]
    assert codecs(trace, cswap_plus.solve) == ["raw", "zvc"]


def test_dense_tensors_go_raw():
    assert codecs(chain([10], [1], [1], [0]), cswap_plus.solve) == ["raw"]
