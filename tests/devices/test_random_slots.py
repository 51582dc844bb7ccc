"""Random steps of slots over a link, on a device that finds memory that is used too early.

Mutants show that the steps are able to fail: without any one wait, they do.
"""

from __future__ import annotations

import linecache
import random
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from bench.twin.lagging_cuda import LaggingStream
from cswap.codecs.tiled import TiledCodec
from cswap.engine.link.ahead import Ahead
from cswap.engine.replay.link_slot import LinkSlot
from cswap.engine.saved.away import Away
from cswap.engine.saved.packed import PackedView
from cswap.schema.plan import Decision, Plan
from tests.devices.lagging_machine import LaggingMachine
from tests.devices.saved import assert_nothing_is_held, result

MIB = 1 << 20


def is_near(back, value):
    """Of a lossy codec."""
    return bool((back - value).norm() <= 0.05 * value.norm())


def random_objective(chance):
    """A budget, a number of tensors that stay, or a plan for positions, often."""
    decisions = {
        position: Decision(
            chance.choice(["keep", "swap", "swap", "recompute"]),
            chance.choice([None, None, "raw", "zvc"]),
            chance.choice([None, 0, 1, 4]),
            chance.choice([None, None, 4096]),
        )
        for position in range(24)
        if chance.random() < 0.8
    }
    return chance.choice(
        [
            {},
            {},
            {"budget": chance.choice([4096, 20000])},
            {"keep_last": 2},
            {"plan": Plan(decisions, budget_bytes=chance.choice([None, 30000, MIB]))},
            {"plan": Plan(decisions, budget_bytes=chance.choice([None, 30000, MIB]))},
        ]
    )


def random_kind(seed, folder):
    """What the host or the codec asks for, by an engine's options and a codec's attribute."""
    disk = {"spill_dir": folder, "host_limit": 20000}
    kinds = [({}, False), ({}, False), ({}, True), (disk, False), (disk, True)]
    others = [({"verify": True}, False), ({"codec": "bf16"}, False)]  # whose sizes are fixed
    return random.Random(f"kind {seed}").choice([*kinds, *others])


class Steps:
    """Steps that save tensors of the same sizes, and other things that happen now and then."""

    def __init__(self, machine, seed, **kind):
        self.random, self.machine = random.Random(seed), machine
        device = machine.device
        device.backlog_bytes = self.random.choice([0, 8192, 65536])
        device.ready_bytes = self.random.choice([4096, 16384, MIB])
        device.part_bytes = self.random.choice([None, None, 4096])
        codec = self.random.choice(["raw", "raw", "zvc", "zvc", "int8"])
        codec = kind.pop("codec", codec)
        if codec in ("int8", "bf16"):
            machine.same = is_near
        host_limit = self.random.choice([None, None, None, 40000])
        options = {"host_limit": host_limit, **random_objective(random.Random(seed)), **kind}
        self.engine = machine.engine(codec, **options)
        n = self.random.randrange(3, 24)
        self.sizes = [self.random.choice([64, 500, 1500, 3000]) for _ in range(n)]
        self.twice = {i for i in range(n) if self.random.random() < 0.2}
        self.parts = {i for i in range(n) if self.random.random() < 0.1}
        with_gaps = random.Random(f"gaps {seed}")
        self.gaps = {i for i in range(n) if with_gaps.random() < 0.1}
        self.other = machine.cuda.Stream()
        self.stays_first, self.n_dropped = random.Random(seed), 0
        self.is_verified = self.is_late = False
        self.stats: Any = None
        self.n_gathered = self.n_away = self.n_parts = self.n_grown = self.n_deep = self.n_first = 0

    def run(self, n_steps):
        for _ in range(n_steps):
            if self.random.random() < 0.9:
                self.engine.begin_step()
                self.shrink()
            steps = [self.forward()]
            if self.random.random() < 0.1:  # two micro-batches of a pipeline
                self.engine.begin_step()
                steps.append(self.forward())
                self.n_deep += sum(len(slot.way.regions) > 1 for slot in self.slots())
            for saved in reversed(steps):
                if self.random.random() < 0.9:
                    self.backward(saved)
                saved.clear()
            self.progress()
        self.engine._end_backward()
        assert_nothing_is_held(self.machine, self.engine)

    def slots(self):
        slots = self.engine.packer.book.slots or ()
        return [slot for slot in slots if isinstance(slot, LinkSlot)]

    def shrink(self):
        """Now and then encodings are larger than the last ones."""
        if self.random.random() < 0.1:
            self.engine._replay.review()
            for slot in self.slots():
                if slot.way.reserves and not slot.way.verbatim:
                    slot.way.reserves = tuple(max(1, n // 2) for n in slot.way.reserves)
                    self.n_grown += 1

    def forward(self):
        saved, kept = [], []
        for i, numel in enumerate(self.sizes):
            if self.random.random() < 0.02:  # a branch that this step does not take
                continue
            numel += 64 * (self.random.random() < 0.02)
            x = result(self.machine.tensor(numel, self.random.randrange(99)))
            if self.random.random() < 0.02:
                x = result(self.machine.tensor(numel, i, torch.float64))
            views = [x, x.detach().view(2, -1) if self.random.random() < 0.1 else x.view(2, -1)]
            if i in self.parts and not x.numel() % 4:
                views = list(x.view(4, -1).unbind())[::-1]
            if i in self.gaps:
                views = [x[: x.numel() // 8 : 2]]
            for y in views[: 1 + (i in self.twice)]:
                packed = self.engine.pack(y)
                self.n_gathered += type(packed) is PackedView and packed.token.handle.gathered
                self.n_away += type(packed) is Away
                self.n_parts += type(packed) is Away and y.numel() < x.numel()
                saved.append((packed, y.detach().clone(), y._version))
            if self.random.random() < 0.1:
                kept.append(x)
            del x, y, views
            if self.random.random() < 0.3:
                self.progress()
            if self.random.random() < 0.02 and saved:
                saved.pop(self.random.randrange(len(saved)))
        if kept and self.random.random() < 0.3:
            with torch.no_grad():
                kept[0].add_(1)
        return saved

    def backward(self, saved):
        if self.stays_first.random() < 0.5:
            self.engine._unpacker._begin_with_kept()
            self.n_first += sum(len(link.ahead.guessed) for link in self.engine._state.lanes.links)
        if self.random.random() < 0.9:
            self.engine._unpacker._note_backward()
        if self.random.random() < 0.1:
            self.random.shuffle(saved)
        again = self.random.random() < 0.2
        while saved:
            at = -1 if self.random.random() < 0.95 else self.random.randrange(len(saved))
            self.ask(*saved[at])
            if not again or self.random.random() < 0.8:
                saved.pop(at)
            if self.random.random() < 0.3:
                self.progress()
            if self.random.random() < 0.01:
                return  # an operator has raised
        self.engine._end_backward()

    def ask(self, packed, value, _version):
        elsewhere = self.random.random() < 0.05
        self.machine.ask(self.engine, packed, value, self.other if elsewhere else None)

    def progress(self):
        self.machine.cuda.run_some(self.random.choice([1, 5, 60]))
        if self.random.random() < 0.2:
            self.engine._state.lanes.pump()


QUICK, FEW, MANY = [*range(14), 1465], [*range(30), 1465], range(30, 1000)
"""Seeds. 1465 found an encoding without room on the host, which two streams decode."""


def run_steps(monkeypatch, seed, folder=None):
    """The steps of one seed. Args: folder: for files; None: the disk is not used."""
    drop, dropped = Ahead.drop, []
    options, is_late = random_kind(seed, folder)
    if folder is None and "spill_dir" in options:
        options = {}

    def dropping(self, region):
        dropped.append(region)
        drop(self, region)

    with monkeypatch.context() as patch:
        patch.setattr("cswap.engine.link.link_way.PART_ALIGN", 64)
        patch.setattr(Ahead, "drop", dropping)
        patch.setattr(TiledCodec, "late_payload", is_late)
        machine = LaggingMachine(patch, seed)
        steps = Steps(machine, seed, **options)
        steps.run(8)
        steps.engine.close()
        steps.stats = steps.engine.stats
    steps.is_verified = "verify" in options
    steps.is_late = is_late and steps.stats.by_codec.keys() - {"raw"} != set()
    steps.n_dropped = len(dropped)
    return steps


@pytest.mark.parametrize(
    "seeds",
    [QUICK, *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in (FEW, MANY))],
    ids=["quick", "few", "many"],
)
def test_random_steps_on_a_lagging_device(monkeypatch, tmp_path, seeds):
    reached: Counter[str] = Counter()
    rare: Counter[str] = Counter()
    for seed in seeds:
        steps = run_steps(monkeypatch, seed, tmp_path)
        faults = steps.machine.cuda.faults
        assert not faults, (seed, faults[:5])
        stats = steps.stats
        kept = stats.kept_by_reason
        rare.update(
            verified=steps.is_verified, late=steps.is_late, files=stats.peak_disk_bytes > 0,
            gathered=steps.n_gathered, fixed="bf16" in stats.by_codec,
        )  # fmt: skip
        decided = kept.get("plan", 0) + kept.get("budget", 0)
        reached.update(
            away=steps.n_away,
            parts=steps.n_parts,
            grown=steps.n_grown,
            deep=steps.n_deep,
            first=steps.n_first,
            dropped=steps.n_dropped,
            decided=decided * (steps.n_away > 0),
        )
    assert reached["away"] > 20 * len(seeds)
    assert min(reached.values()) > len(seeds) // 2, reached
    assert len(rare) == 5
    assert min(rare.values()) > len(seeds) // 20, rare


IMPLIED = {
    "way_out.py:self._streams.d2h.wait_event(loan.after)",
    "way_out.py:d2h.wait_event(part.arrived)",
}
"""Waits for host memory to have been read. The stream that saves the next tensor has waited for
that, too, unless a program saves on several streams, which these steps do not."""


def waiting_line():
    """The line of `cswap.engine.link` that lets a stream wait, if it is one of those."""
    frame: Any = sys._getframe(2)
    while frame is not None and "/cswap/devices/" in frame.f_code.co_filename:
        frame = frame.f_back
    path = "" if frame is None else frame.f_code.co_filename
    if frame is None or "/engine/link/" not in path:
        return None
    return f"{path.rsplit('/', 1)[1]}:{linecache.getline(path, frame.f_lineno).strip()}"


@pytest.mark.slow
def test_every_wait_is_needed(monkeypatch, tmp_path):
    """Without any one of them, some random steps use memory too early, or give other values."""
    wait, left_out, lines = LaggingStream.wait_event, [None], set()

    def wait_event(stream, event):
        line = waiting_line()
        lines.add(line)
        if line is None or line != left_out[0]:
            wait(stream, event)

    def is_caught(seed):
        try:
            return bool(run_steps(monkeypatch, seed, tmp_path).machine.cuda.faults)
        except AssertionError:
            return True

    monkeypatch.setattr(LaggingStream, "wait_event", wait_event)
    assert not any(is_caught(seed) for seed in FEW)
    needless = set()
    for line in sorted(lines - {None}):
        left_out[0] = line
        if not any(is_caught(seed) for seed in range(100)):
            needless.add(line)
    assert needless == IMPLIED
    assert len(lines) > 12
