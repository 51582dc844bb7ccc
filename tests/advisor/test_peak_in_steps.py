"""Which tensors of a step have to stay, so that its peak is low: the limit and the engine."""

import gc
import sys
from typing import Any

import pytest
import torch

import cswap
from bench.workloads.saved_bytes import heap_bytes
from cswap.advisor.advisor import WHY_KEPT, Advisor
from cswap.advisor.gains import UNUSED, Gain
from cswap.advisor.live_costs import KEEP
from cswap.advisor.step_reports import LOOK_EVERY, StepReports
from cswap.advisor.time_limit import (
    MEASURED_SHARE,
    NO_LOWER_PEAK,
    NO_TIME,
    Moment,
    TimeLimit,
)
from cswap.config import SwapConfig
from cswap.engine.saved.packed import Kept

MIB = 1 << 20
STEP_S = 1.0
SLOWDOWN = 1.1
LIMIT_S = MEASURED_SHARE * (SLOWDOWN - 1) * STEP_S


def looked_at(limit, gains, sizes, steps=LOOK_EVERY, step_s=STEP_S, leaving_s=0.0):
    """Steps that save tensors of these sizes; those with a gain could leave."""
    at_s = 0.0
    for _ in range(steps + 1):
        moment = Moment(at_s, at_s / step_s * leaving_s, 0.0)
        limit.begin_step(moment, moment)
        held = 0.0
        for position, nbytes in enumerate(sizes):
            gain = gains.get(position)
            if gain is not None:
                limit.note(position, nbytes, gain)
            leaves = gain is not None and not limit.keeps(position, nbytes)
            held += nbytes - gain.nbytes if leaves else nbytes
            if limit.reports.wanted:
                limit.reports.holds((position, nbytes), held)
        at_s += step_s
    limit.look_back()


def test_the_tensor_that_backward_asks_for_first_stays_though_there_is_time():
    limit = TimeLimit(SLOWDOWN)
    gains = {n: Gain(LIMIT_S / 100, MIB / 2) for n in range(5)}
    looked_at(limit, gains, 5 * [MIB])
    assert limit.staying == {(4, MIB)}
    assert limit.reason_of(4, MIB) == NO_LOWER_PEAK
    for _ in range(10):  # and it stays so: what it would have saved is known
        looked_at(limit, gains, 5 * [MIB])
        assert limit.staying == {(4, MIB)}


@pytest.mark.parametrize("slowdown", [SLOWDOWN, float("inf")])
def test_other_tensors_that_stay_raise_the_peak_of_late_ones(slowdown):
    # The large one at position 3 cannot leave: the peak is there, not at the end.
    limit = TimeLimit(slowdown)
    gains = {n: Gain(LIMIT_S / 100, MIB / 2) for n in (0, 1, 2, 4)}
    looked_at(limit, gains, [MIB, MIB, MIB, 32 * MIB, MIB])
    assert limit.staying == {(4, MIB)}
    limit.forget()
    assert not limit.staying


def test_with_too_little_time_the_peak_is_as_low_as_it_can_be():
    limit = TimeLimit(SLOWDOWN)
    gains = {n: Gain(LIMIT_S / 4, MIB / 2) for n in range(8)}
    looked_at(limit, gains, 8 * [MIB], leaving_s=2 * LIMIT_S)
    reasons = {limit.reason_of(*key) for key in limit.staying if key != (7, MIB)}
    assert reasons == {NO_TIME}
    assert limit.reason_of(7, MIB) == NO_LOWER_PEAK  # the last one would stay in any case
    # Four have to stay at least (with the correction of times); the last ones cost the least peak.
    n_stay = len(limit.staying)
    assert n_stay >= 4
    assert limit.staying == {(n, MIB) for n in range(8 - n_stay, 8)}


def test_steps_of_two_sizes_are_not_taken_for_one():
    limit = TimeLimit(SLOWDOWN)
    short = {n: Gain(LIMIT_S / 100, MIB / 2) for n in range(5)}
    long = {n: Gain(LIMIT_S / 100, MIB) for n in range(5)}
    looked_at(limit, long, 5 * [2 * MIB])
    assert limit.staying == {(4, 2 * MIB)}
    for _ in range(2):  # nothing is said about these while those may come back
        looked_at(limit, short, 5 * [MIB])
        assert limit.staying == {(4, 2 * MIB)}
    looked_at(limit, short, 5 * [MIB], steps=UNUSED + LOOK_EVERY)
    assert limit.staying == {(4, MIB)}


def test_where_the_next_forward_comes_before_the_backward_no_peak_decides():
    limit = TimeLimit(SLOWDOWN)
    gains = {n: Gain(LIMIT_S / 100, MIB / 2) for n in range(5)}
    looked_at(limit, gains, 5 * [MIB])
    assert limit.staying
    ended = Moment(100.0, 1.0, 0.0)
    limit.begin_step(ended, ended)
    limit.begin_step(Moment(101.0, 1.1, 0.0), ended)  # tensors have left, none was asked for
    assert not limit.staying
    looked_at(limit, gains, 5 * [MIB])
    assert not limit.staying
    looked_at(limit, gains, 5 * [MIB], steps=UNUSED + LOOK_EVERY)
    assert limit.staying == {(4, MIB)}


def test_a_tensor_that_never_leaves_takes_no_time():
    advisor = Advisor(SwapConfig(), None)
    limit = advisor.limit
    assert limit is not None
    gains = {n: Gain(LIMIT_S / 100, MIB / 2) for n in range(4)} | {4: Gain(9 * LIMIT_S, MIB / 2)}
    for position, gain in gains.items():
        limit.note(position, MIB, gain)
    advisor.stays(4, MIB)
    del gains[4]
    looked_at(limit, gains, 5 * [MIB])
    assert limit.staying <= {(3, MIB)}


def test_a_report_of_another_forward_begins_anew():
    reports = StepReports()
    for position in (0, 1, 2, 0, 1):
        reports.holds((position, MIB), MIB * (position + 1))
    assert reports.saved == [((0, MIB), MIB), ((1, MIB), 2 * MIB)]


class Rectified(torch.nn.Module):
    """Layers of one size. Each saves what a codec halves, and cannot compute it again."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def kept_bytes(besides):
    """Bytes of the large tensors that autograd holds as they are."""
    kept = [one.tensor for one in gc.get_objects() if type(one) is Kept]
    found = {x.data_ptr(): x.nbytes for x in kept if x.nbytes >= MIB}
    found.pop(besides.data_ptr(), None)
    return sum(found.values())


@pytest.mark.parametrize("lossy", ["off", pytest.param("int8", marks=pytest.mark.slow)])
def test_an_engine_leaves_the_tensor_that_was_saved_last(lossy, monkeypatch):
    monkeypatch.setattr("cswap.advisor.time_limit.LEAST_S", 1e3)
    monkeypatch.setattr("cswap.quiet_modules.quiet_modules.QuietModules.run", lambda *_: None)
    torch.manual_seed(0)
    model, head, x = Rectified(6), torch.nn.Linear(64, 64), torch.randn(1 << 13, 64)
    # A byte's price is high enough for the codecs of any machine.
    options: dict[str, Any] = {"lossy": lossy, "slowdown": 3.0}
    with cswap.install(model, **options) as handle:
        held = []
        for _ in range(20):
            out = model(x)
            stats = handle.engine.stats
            held.append((stats.kept_by_reason.get("peak", 0), kept_bytes(x)))
            loss = head(out).square().mean()
            del out
            loss.backward()
        choices = handle.engine.explain()
    assert held[-1][0] > held[3][0] == 0
    assert held[-1][1] - held[3][1] == 2 * MIB  # one of them
    last = max(choices, key=lambda e: e.position)
    assert (last.codec, last.reason) == (KEEP, WHY_KEPT[NO_LOWER_PEAK])
    assert [e.codec == KEEP for e in choices if e.position not in (0, last.position)] == 5 * [False]


def test_two_forwards_of_one_loss_keep_nothing_for_the_peak(monkeypatch):
    monkeypatch.setattr("cswap.advisor.time_limit.LEAST_S", 1e3)
    torch.manual_seed(0)
    model, head = Rectified(6), torch.nn.Linear(64, 64)
    batches = [torch.randn(1 << 13, 64) for _ in range(2)]
    with cswap.install(model) as handle:
        for _ in range(12):
            first, second = (head(model(x)).square().mean() for x in batches)
            (first + second).backward()
        stats = handle.stats
    assert stats.swapped > 0
    assert "peak" not in stats.kept_by_reason


class AsOneNode(torch.autograd.Function):
    """Asks for all of its saved tensors at once, as the backward of a compiled graph does."""

    heap: list[int] = []  # noqa: RUF012 - of the last step

    @staticmethod
    def forward(ctx, x, layers):
        ctx.save_for_backward(*(x * (n + 1) for n in range(layers)))
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        AsOneNode.heap.append(heap_bytes() or 0)
        return grad * sum(saved), None


class Nodes(torch.nn.Module):
    def __init__(self, nodes, layers):
        super().__init__()
        self.nodes, self.layers = nodes, layers
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return sum(AsOneNode.apply(self.scale * x, self.layers) for _ in range(self.nodes))


def peaks_of_nodes(nodes, layers, steps, options):
    """Per step, the largest heap when a node has asked for its tensors, in tensors of 2 MiB."""
    model, x = Nodes(nodes, layers), torch.randn(1 << 19)
    peaks = []

    def train():
        for _ in range(steps):
            AsOneNode.heap.clear()
            before = heap_bytes() or 0  # with kernels that were compiled meanwhile
            model(x).backward()
            peaks.append((max(AsOneNode.heap) - before) / x.nbytes)

    if options is None:
        train()
    else:
        with cswap.install(model, **options):
            train()
    return peaks


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is glibc's")


@LINUX
def test_tensors_that_one_node_asks_for_at_once_do_not_come_back_beside_their_encodings():
    plain = peaks_of_nodes(1, 12, 2, None)[-1]
    peaks = peaks_of_nodes(1, 12, 4 * LOOK_EVERY, {"lossy": "int8"})
    assert peaks[1] > plain + 1.5  # before anything is known of its nodes
    assert max(peaks[-LOOK_EVERY:]) < plain + 0.5


@pytest.mark.slow
@LINUX
def test_of_several_nodes_the_last_one_keeps_its_tensors_and_the_others_do_not():
    plain = peaks_of_nodes(3, 12, 2, None)[-1]
    peaks = peaks_of_nodes(3, 12, 4 * LOOK_EVERY, {"lossy": "int8"})
    assert plain > 36
    # 12 of the last node and the encodings of 24, with no encoder's workspace any more: their nodes
    # ask for nothing that has left. 20.5 if all had left.
    assert max(peaks[-LOOK_EVERY:]) < 18
