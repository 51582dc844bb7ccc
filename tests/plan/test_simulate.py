"""The simulator: closed forms, equality with the exact replay, and what a plan may not do."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from cswap.codecs.traits import CodecRate
from cswap.errors import ConfigError, InternalError
from cswap.plan.hardware import Hardware
from cswap.plan.simulate import CAUSES, Simulator, simulate, smallest_feasible_budget
from cswap.plan.simulator import simulator as simulator_module
from cswap.plan.simulator import state, tables
from cswap.plan.simulator.lifetimes import SWAPPABLE_ROLES, lifetimes, live_bytes
from cswap.schema.plan import Decision, Plan
from cswap.schema.trace import Trace, TraceOperator, TraceTensor
from tests.plan.exact_simulator import Replay

BIG = 1 << 50


def machine(**changes):
    base = Hardware("test", BIG, {}, 1e12, 1e6, 1e6, codecs={"zvc": CodecRate(4e6, 8e6, 0.0)})
    return replace(base, **changes)


def op(phase, duration_s, inputs, outputs, workspace=0, name=""):
    return TraceOperator(name, "other", phase, duration_s, tuple(inputs), tuple(outputs), workspace)


def chain(n, duration_s, nbytes, ratio=1.0):
    """n layers: layer i reads x_i, makes x_i+1; its backward reads x_i and the gradient."""
    tensors = [TraceTensor(nbytes, saved=i, ratios={"zvc": ratio}) for i in range(n)]
    out, grad = n, n + 1
    tensors += [TraceTensor(0), TraceTensor(0, role="gradient")]
    operators = [op("forward", duration_s, [], [0])]
    operators += [op("forward", duration_s, [i], [i + 1]) for i in range(n)]
    operators.append(op("forward", 0.0, [out], [grad]))
    operators += [op("backward", duration_s, [i, grad], []) for i in reversed(range(n))]
    return Trace(tuple(operators), tuple(tensors))


def arrays(simulator, action, codec=0, prefetch=None):
    n = len(simulator.saved)
    starts = simulator.backward if prefetch is None else prefetch
    return np.full(n, action, np.int8), np.full(n, codec, np.int8), np.asarray(starts, np.int32)


def test_a_step_that_keeps_everything_takes_its_durations_and_all_its_bytes():
    simulator = Simulator(chain(10, 0.5, 1000), machine())
    result = simulator.run(*arrays(simulator, 0))
    assert result.step_s == pytest.approx(21 * 0.5, rel=1e-12)
    assert result.peak_bytes == max(live_bytes(simulator.trace)) == 10_000
    assert sum(result.exposed_s) == 0.0
    assert result.feasible


@pytest.mark.parametrize("copy_s", [0.25, 0.5, 1.0, 2.75])
def test_uniform_chain_backward_is_the_slower_of_compute_and_copy_per_stage(copy_s):
    """Everything swapped, one swap-in ahead of every stage: fill, then n times the maximum."""
    n, compute_s = 12, 0.5
    hardware = machine(d2h_bytes_per_s=1e12, h2d_bytes_per_s=1000 / copy_s)
    simulator = Simulator(chain(n, compute_s, 1000), hardware)
    ahead = np.maximum(simulator.backward - 1, n + 2)
    result = simulator.run(*arrays(simulator, 1, prefetch=ahead))
    forward_s = (n + 1) * compute_s
    stages_s = (n - 1) * max(compute_s, copy_s)  # the last tensor is wanted at once, and stays
    assert result.step_s == pytest.approx(forward_s + stages_s + compute_s, rel=1e-9)
    assert result.exposed_s[CAUSES.index("swap_in")] == pytest.approx(
        (n - 1) * max(copy_s - compute_s, 0.0), rel=1e-9
    )


@pytest.mark.parametrize("copy_s", [0.25, 0.5, 1.0, 2.75])
def test_uniform_chain_forward_is_the_slower_of_compute_and_copy_per_stage(copy_s):
    """Room for three: what is read, what is made, and what leaves meanwhile."""
    n, compute_s = 12, 0.5
    hardware = machine(d2h_bytes_per_s=1000 / copy_s, h2d_bytes_per_s=1e12)
    simulator = Simulator(chain(n, compute_s, 1000), hardware, 3000)
    result = simulator.run(*arrays(simulator, 1))
    # x_0 leaves when layer 0 has ended, at 2 stages; then one tensor per stage. The last layer but
    # one waits until the tensor that was saved two layers before has left; the last makes nothing
    # that takes room. Every stage of backward is a copy (1 ns) and its compute. The tensors that
    # have not left by then stay and are not copied.
    if copy_s <= compute_s:
        turn_s, stayed = (n + 1) * compute_s, 1
    else:
        turn_s = 4 * compute_s + (n - 3) * copy_s
        stayed = 3 if copy_s > 4 * compute_s else 2
    back_s = n * compute_s + (n - stayed) * 1000 / 1e12
    assert result.feasible
    assert result.step_s == pytest.approx(turn_s + back_s, rel=1e-9)


@pytest.fixture
def draining(monkeypatch):
    """Operators and swap-ins wait for all swap-outs, as in the runs without time."""

    def built(*arguments):
        template = tables.build(*arguments)
        template.step["drain"] = 1
        return template

    monkeypatch.setattr(simulator_module, "build", built)


@pytest.mark.usefixtures("draining")
def test_codec_adds_its_times_and_divides_the_copies():
    hardware = machine(codecs={"zvc": CodecRate(4000.0, 8000.0, 0.125)})
    simulator = Simulator(chain(1, 1.0, 1_000_000, ratio=4.0), hardware)
    result = simulator.run(*arrays(simulator, 1, codec=1))
    encode_s, decode_s, copy_s = 250.125, 125.125, 0.25
    assert result.step_s == pytest.approx(3.0 + encode_s + decode_s + 2 * copy_s, rel=1e-9)
    assert result.link_bytes == 500_000
    assert result.peak_bytes == 1_250_000


def wanted_after(seconds, codec):
    """Two tensors of 1 MB leave together at 1 s, and are wanted, the later first, so much later.

    An encode takes 4 s, a decode 2 s, a copy 1 s raw and 0.25 s encoded.
    """
    tensors = [TraceTensor(1_000_000, saved=i, ratios={"zvc": 4.0}) for i in range(2)]
    operators = (
        op("forward", 1.0, [], [0, 1]),
        op("forward", seconds, [], []),
        op("backward", 0.5, [1], []),
        op("backward", 0.5, [0], []),
    )
    hardware = machine(codecs={"zvc": CodecRate(250_000, 500_000, 0.0)})
    simulator = Simulator(Trace(operators, tuple(tensors)), hardware)
    return simulator.run(*arrays(simulator, 1, codec=codec))


STAYS = [
    # codec, seconds until wanted, waited seconds by cause, bytes copied, peak of device memory
    (0, 0.0, {}, 1_000_000, 2_000_000),  # x0 is being copied, x1 is queued: both stay
    (0, 1.5, {"swap_in": 1.0}, 3_000_000, 2_000_000),  # x0 has left, x1 is being copied
    (1, 1.0, {}, 0, 2_250_000),  # x0 is being encoded, x1 is queued: both stay
    # x0 has left encoded. x1, in its encode, stays; the decode of x0 waits for the end of that.
    (1, 4.125, {"swap_in": 0.25, "codec": 3.125 + 2.0}, 500_000, 2_250_000),
    # x0 is encoded, and its raw bytes are gone: it waits for the copies and the decode.
    (1, 3.6, {"swap_out": 0.15, "swap_in": 0.25, "codec": 2.0}, 500_000, 2_250_000),
]


@pytest.mark.parametrize(("codec", "seconds", "waited", "copied", "peak"), STAYS)
def test_tensors_on_their_way_out_stay_as_long_as_their_raw_bytes_are_there(
    codec, seconds, waited, copied, peak
):
    result = wanted_after(seconds, codec)
    assert result.step_s == pytest.approx(2.0 + seconds + sum(waited.values()), rel=1e-9)
    assert result.exposed_s == pytest.approx([waited.get(cause, 0.0) for cause in CAUSES])
    assert result.link_bytes == copied
    assert result.peak_bytes == peak


def test_codec_tax_slows_what_it_overlaps():
    """f1 (10 s) runs while x0 is encoded for 4 s at half speed: 2 s are lost."""
    tensors = (TraceTensor(4_000, saved=0, ratios={"zvc": 2.0}), TraceTensor(0), TraceTensor(0))
    operators = (
        op("forward", 1.0, [], [0]),
        op("forward", 10.0, [], [1]),
        op("forward", 10.0, [1], [2]),
        op("backward", 1.0, [0, 2], []),
    )
    hardware = machine(codec_tax=0.5, codecs={"zvc": CodecRate(1000.0, 1e15, 0.0)})
    simulator = Simulator(Trace(operators, tensors), hardware)
    result = simulator.run(*arrays(simulator, 1, codec=1, prefetch=[2]))
    assert result.step_s == pytest.approx(22.0 + 2.0, rel=1e-9)
    assert result.exposed_s[CAUSES.index("codec")] == pytest.approx(2.0, rel=1e-9)


def test_encodings_count_where_host_memory_is_the_devices_own():
    """Of six tensors of 1 MB five are encoded into a quarter. The last, wanted at once, stays."""
    trace = chain(6, 1.0, 1_000_000, ratio=4.0)
    hardware = machine(unified=True, codecs={"zvc": CodecRate(1e12, 1e12, 0.0)})
    simulator = Simulator(trace, hardware)
    result = simulator.run(*arrays(simulator, 1, codec=1))
    assert result.step_s == pytest.approx(13.0, rel=1e-4)  # no copy at 1 MB/s
    assert result.link_bytes == 0
    # At the start of f4: x3, which is being encoded, x4, x5, and the encodings of x0 to x3.
    assert result.peak_bytes == 3_000_000 + 4 * 250_000
    assert result.host_peak_bytes == 5 * 250_000


def test_raw_swaps_gain_nothing_where_host_memory_is_the_devices_own():
    simulator = Simulator(chain(6, 1.0, 1_000_000), machine(unified=True))
    swapped, kept = (simulator.run(*arrays(simulator, action)) for action in (1, 0))
    assert swapped == kept
    assert swapped.peak_bytes == 6_000_000
    plan = simulator.to_plan(*arrays(simulator, 1))
    assert {decision.action for decision in plan.decisions.values()} == {"keep"}
    assert plan.predicted["peak_bytes"] == 6_000_000


def test_both_directions_share_the_link():
    """x0 comes back while x1 leaves: both at half speed."""
    tensors = (TraceTensor(1_000_000, saved=0), TraceTensor(1_000_000, saved=1), TraceTensor(0))
    operators = (
        op("forward", 1.0, [], [0]),
        op("forward", 10.0, [0], []),
        op("forward", 1.0, [], [1, 2]),
        op("backward", 1.0, [0, 2], []),
        op("backward", 1.0, [1], []),
    )
    hardware = machine(duplex_factor=0.5)
    simulator = Simulator(Trace(operators, tensors), hardware)
    # x0 leaves at 11, is back in host at 12; x1 leaves from 12 on, x0 is asked for at 12.
    result = simulator.run(*arrays(simulator, 1))
    assert result.step_s == pytest.approx(12 + 2 + 1 + 1 + 1, rel=1e-9)


def test_recomputation_runs_the_segment_once_and_keeps_what_it_saved():
    n = 8
    simulator = Simulator(chain(n, 0.5, 1000), machine())
    action, codec, prefetch = arrays(simulator, 2)
    action[0] = 0
    result = simulator.run(action, codec, prefetch)
    assert result.exposed_s[CAUSES.index("recompute")] == pytest.approx((n - 1) * 0.5, rel=1e-9)
    assert result.step_s == pytest.approx((2 * n + 1 + n - 1) * 0.5, rel=1e-9)
    assert result.peak_bytes == n * 1000


@pytest.mark.usefixtures("draining")
def test_sections_leave_one_by_one():
    """A section is copied out while the next is encoded."""
    trace = chain(1, 1.0, 1_000_000, ratio=4.0)
    hardware = machine(codecs={"zvc": CodecRate(1e6, 1e15, 0.0)})
    whole = simulate(trace, hardware, Plan({0: Decision("swap", "zvc")}))
    sections = Plan({0: Decision("swap", "zvc", section_bytes=250_000)})
    cut = simulate(trace, hardware, sections)
    assert whole.step_s == pytest.approx(3 + 1.0 + 0.25 + 0.25, rel=1e-6)
    assert cut.step_s == pytest.approx(3 + 1.0 + 5 * 0.0625, rel=1e-6)
    assert cut.peak_bytes < whole.peak_bytes


def with_positions(trace):
    """The trace with new values of ``saved``: tensors with a gap, numbered by last forward use."""
    life = lifetimes(trace)
    gapped = [
        i
        for i, tensor in enumerate(trace.tensors)
        if min(life.forward[i], life.backward[i]) >= 0
        and tensor.nbytes > 0
        and tensor.role in SWAPPABLE_ROLES
    ]
    position = {i: p for p, i in enumerate(sorted(gapped, key=lambda i: (life.forward[i], i)))}
    return replace(
        trace,
        tensors=tuple(
            replace(tensor, saved=position.get(i, -1)) for i, tensor in enumerate(trace.tensors)
        ),
    )


def random_trace(rng, exact):
    """A small network: branches, several outputs and users, dead intermediates, an input."""

    def seconds():
        return rng.randrange(0, 8) / 4 if exact else rng.random() * 2

    def size():
        return rng.choice([0, 1, 2, 4, 8]) * 250_000 if exact else rng.randrange(1, 2_000_000)

    def tensor(role="activation"):
        ratios = {"zvc": rng.choice([1.0, 2.0, 4.0]), "lz": rng.choice([1.0, 8.0])}
        tensors.append(TraceTensor(size(), role=role, ratios=ratios if rng.random() < 0.9 else {}))
        return len(tensors) - 1

    tensors: list[TraceTensor] = []
    operators: list[TraceOperator] = []
    live = [tensor("input") for _ in range(rng.randrange(1, 3))]
    layers = []
    for _ in range(rng.randrange(1, 7)):
        inputs = rng.sample(live, min(len(live), rng.randrange(1, 3)))
        outputs = [tensor() for _ in range(1 + (rng.random() < 0.2))]
        operators.append(
            op("forward", seconds(), inputs, outputs, size() if rng.random() < 0.3 else 0)
        )
        layers.append((inputs, outputs))
        live = [*live, *outputs][-4:]
        if rng.random() < 0.4:  # some of it is written in place, maybe from another tensor
            read = rng.sample(live, min(len(live), rng.randrange(1, 3)))
            writer = op("forward", seconds(), read, [tensor()] if rng.random() < 0.2 else [])
            operators.append(replace(writer, writes=(read[0],)))
    read = {t for inputs, _ in layers for t in inputs}
    gradient = tensor("gradient")
    lasts = [t for _, outputs in layers[-1:] for t in outputs]
    operators.append(
        op(
            "forward",
            seconds(),
            [*lasts, *(t for t in live[:1] if t not in read and t not in lasts)],
            [gradient],
        )
    )
    for inputs, outputs in reversed(layers):
        saved = [t for t in [*inputs, *outputs] if rng.random() < 0.7]
        made = tensor("gradient")
        operators.append(
            op(
                "backward",
                seconds(),
                [*saved, gradient],
                [made],
                size() if rng.random() < 0.3 else 0,
            )
        )
        gradient = made
    if rng.random() < 0.5:
        operators.append(op("optimizer", seconds(), [gradient], []))
    used = {t for o in operators for t in (*o.inputs, *o.outputs)}
    renumber = {t: i for i, t in enumerate(sorted(used))}
    operators = [
        replace(
            o,
            inputs=tuple(renumber[t] for t in o.inputs),
            outputs=tuple(renumber[t] for t in o.outputs),
            writes=tuple(renumber[t] for t in o.writes),
        )
        for o in operators
    ]
    kept = tuple(tensors[t] for t in sorted(used))
    resident = rng.choice([0, 0, 500_000])
    return with_positions(Trace(tuple(operators), kept, resident_bytes=resident))


def random_machine(rng, exact):
    power = (lambda: 2.0 ** rng.randrange(18, 24)) if exact else (lambda: 10 ** rng.uniform(5, 8))
    rate = (lambda: 250_000 * 2.0 ** rng.randrange(0, 5)) if exact else power
    codecs = {name: CodecRate(rate(), rate(), rng.choice([0.0, 0.25])) for name in ("zvc", "lz")}
    return Hardware(
        "random", BIG, {}, 1e12, rate(), rate(), rng.choice([1.0, 0.5]),
        link_latency_s=rng.choice([0.0, 0.125]), codec_tax=rng.choice([0.0, 0.5, 0.75]),
        host_memory_bytes=rng.choice([0, 0, 3_000_000]), codecs=codecs,
    )  # fmt: skip


def random_case(seed, *, unified=False):
    rng = random.Random(seed)
    exact = seed % 2 == 0  # times that floats hold exactly, so that many events coincide
    trace = random_trace(rng, exact)
    hardware = replace(random_machine(rng, exact), unified=unified)
    floor, full = smallest_feasible_budget(trace, hardware), max(live_bytes(trace))
    budget = rng.choice([floor, full, int(floor + (full - floor) * rng.random()), int(floor * 0.9)])
    simulator = Simulator(trace, hardware, budget)
    simulator._template.step["drain"] = rng.random() < 0.1
    n = len(simulator.saved)
    action = np.array([rng.choice([0, 1, 1, 1, 2]) for _ in range(n)], np.int8)
    codec = np.array([rng.choice([0, 0, 1, 2]) for _ in range(n)], np.int8)
    if rng.random() < 0.4:
        prefetch = simulator.earliest_prefetch(action, codec)
    else:
        prefetch = np.array([rng.randrange(len(trace.operators)) for _ in range(n)], np.int32)
    return simulator, action, codec, prefetch


def replayed(simulator, action, codec, prefetch):
    names = [simulator.codecs[c] for c in codec]
    drain = bool(simulator._template.step["drain"])
    return Replay(
        simulator.trace, simulator.hardware, simulator.budget_bytes,
        action.tolist(), names, prefetch.tolist(), drain,
    ).run()  # fmt: skip


@pytest.mark.parametrize(
    "block", [pytest.param(n, marks=pytest.mark.slow if n > 2 else ()) for n in range(10)]
)
def test_equals_the_exact_replay_on_random_traces(block):
    feasible = swaps = 0
    for seed in range(100 * block, 100 * block + 100):
        simulator, *choice = random_case(seed, unified=seed % 5 == 0)
        result = simulator.run(*choice)
        truth = replayed(simulator, *choice)
        assert result.feasible == truth.feasible, seed
        assert result.peak_bytes == truth.peak_bytes, seed
        assert result.host_peak_bytes == truth.host_peak_bytes, seed
        assert result.link_bytes == truth.link_bytes, seed
        assert result.step_s == pytest.approx(float(truth.step_s), rel=1e-9), seed
        assert result.average_bytes == pytest.approx(float(truth.average_bytes), rel=1e-9), seed
        expected = [float(truth.exposed_s[cause]) for cause in CAUSES]
        assert result.exposed_s == pytest.approx(expected, rel=1e-9, abs=1e-9), seed
        total_s = simulator.compute_s + sum(result.exposed_s)
        assert result.step_s == pytest.approx(total_s, rel=1e-9, abs=1e-9), seed
        feasible += result.feasible
        swaps += result.link_bytes > 0
    assert feasible > 10
    assert swaps > 40


def test_no_field_has_the_name_of_an_attribute_of_numpys_records():
    """Uncompiled code, as under a debugger, would read the attribute in its place."""
    types = state.STEP, state.OPERATOR, state.TENSOR, state.POSITION
    assert not {name for each in types for name in each.names or ()} & {*dir(np.record)}


def test_smallest_budget_runs_and_one_byte_less_never_does():
    tight = 0
    for seed in range(150):
        simulator, action, codec, prefetch = random_case(seed)
        trace, hardware = simulator.trace, replace(simulator.hardware, host_memory_bytes=0)
        floor = smallest_feasible_budget(trace, hardware)
        there = Simulator(trace, hardware, floor)
        assert there.run(*arrays(there, 1)).feasible
        below = Simulator(trace, hardware, floor - 1)
        assert not below.run(*arrays(below, 1)).feasible
        assert not below.run(action, codec, prefetch).feasible
        tight += floor < max(live_bytes(trace))
    assert tight > 50


def test_early_prefetches_keep_a_feasible_plan_feasible():
    """In raw, where no encode needs room of its own: what runs on demand runs prefetched."""
    sooner = 0
    for seed in range(150):
        simulator, action, codec, _ = random_case(seed)
        codec[:] = 0
        demand = simulator.run(action, codec, simulator.backward)
        early = simulator.run(action, codec, simulator.earliest_prefetch(action, codec))
        if demand.feasible:
            assert early.feasible, seed
            sooner += early.step_s < demand.step_s
    assert sooner > 30


def test_plans_and_arrays_convert_both_ways():
    for seed in range(100):
        simulator, action, codec, prefetch = random_case(seed)
        plan = simulator.to_plan(action, codec, prefetch, policy="p")
        again = simulator.from_plan(Plan.parse(json.loads(json.dumps(plan.to_dict()))))
        swapped = action == 1
        np.testing.assert_array_equal(again[0], action)
        np.testing.assert_array_equal(again[1][swapped], codec[swapped])
        starts = np.clip(prefetch, simulator.forward + 1, simulator.backward)
        later = np.clip(again[2], simulator.forward + 1, simulator.backward)
        assert (later >= starts)[swapped].all()
        assert plan.predicted["step_s"] == simulator.run(*again).step_s
        third = simulator.from_plan(simulator.to_plan(*again))
        np.testing.assert_array_equal(third[2][swapped], again[2][swapped])


def test_violations_name_what_is_broken_and_where():
    trace = chain(6, 1.0, 1_000_000)
    hardware = machine(host_memory_bytes=1_500_000)
    plan = Plan({p: Decision("swap", prefetch=0) for p in range(6)})
    assert any("host memory" in text for text in simulate(trace, hardware, plan).violations)
    kept = simulate(trace, machine(), Plan(), 3_000_000)
    assert not kept.feasible
    assert kept.violations == (
        "device memory: 6000000 bytes of 3000000; first over budget at operator 3 ()",
    )
    lost = replace(trace, tensors=(replace(trace.tensors[0], role="input"), *trace.tensors[1:]))
    lost = replace(lost, operators=lost.operators[1:])
    assert not Simulator(lost, machine()).recomputable[0]
    result = simulate(lost, machine(), Plan({0: Decision("recompute")}))
    assert "gone" in result.violations[0]


def test_wrong_plans_and_arrays_are_refused():
    trace = chain(3, 1.0, 1000)
    with pytest.raises(ConfigError, match=r"plan\.decisions\[7\]"):
        simulate(trace, machine(), Plan({7: Decision("swap")}))
    with pytest.raises(ConfigError, match=r"plan\.decisions\[1\]\.codec='zcv'"):
        simulate(trace, machine(), Plan({1: Decision("swap", "zcv")}))
    simulator = Simulator(trace, machine())
    with pytest.raises(InternalError):
        simulator.run(*(values[:2] for values in arrays(simulator, 1)))
    with pytest.raises(InternalError):
        simulator.run(*arrays(simulator, 1, codec=9))
