"""nvCOMP's codecs in the engine, over a link: their sizes come late, and the library may fail."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

import pytest
import torch

from cswap.advisor import candidates, live_costs
from cswap.codecs import nvcomp_library
from cswap.codecs.nvcomp import NvcompCodec
from cswap.codecs.registry import get_codec
from cswap.codecs.traits import CodecRate
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.engine.order.chooser import Choice
from cswap.engine.saved.away import Away
from cswap.engine.saved.packed import PackedView
from cswap.errors import UnsupportedError
from cswap.schema.plan import Decision, Plan
from tests.codecs.nvcomp_stand_in import FakeArray, FakeCodec, forgotten, installed
from tests.devices.lagging_machine import LaggingMachine

N, NUMEL = 4, 1 << 15
FAST = CodecRate(1e12, 1e12, 0.0)


@pytest.fixture
def machine(monkeypatch):
    """A GPU's stand-in, and one of nvCOMP, whose codecs count as fast."""
    with forgotten(monkeypatch):
        made: Any = LaggingMachine(monkeypatch)
        made.nvcomp = installed(monkeypatch)
        supports, names = NvcompCodec.supports, candidates.nvcomp_candidates
        rate = candidates.default_rate
        on_gpu = {
            (NvcompCodec, "supports"): lambda codec, dtype, _="": supports(codec, dtype, "cuda"),
            (live_costs, "nvcomp_candidates"): lambda _: names("cuda"),
            (live_costs, "default_rate"): lambda codec, kind: (
                FAST if codec.name.startswith("nvcomp") else rate(codec, kind)
            ),
        }
        for (where, name), value in on_gpu.items():
            monkeypatch.setattr(where, name, value)
        yield made
        assert not made.cuda.faults, made.cuda.faults[:5]


def engine_of(machine, codec="auto", plan=None, **options):
    config = SwapConfig(codec=codec, min_bytes=0, **options)
    return SwapEngine(config, plan, device=machine.device)


def step(machine, engine, n=N):
    """A step that saves normal values, and gets them back; its packed objects' types."""
    engine.begin_step()
    packed, values = [], []
    for i in range(n):
        x = machine.tensor(NUMEL, i, torch.bfloat16)
        x.add_(0.25)  # dense
        values.append(x.clone())
        packed.append(engine.pack(x))
        del x
    kinds = {type(p) for p in packed}
    machine.cuda.synchronize()
    engine.synchronize()
    while packed:
        machine.ask(engine, packed.pop(), values.pop(), None)
    machine.cuda.synchronize()
    engine._end_backward()
    return kinds


def used(engine):
    return {name for name, done in engine.stats.by_codec.items() if done.count}


@pytest.mark.parametrize(
    "options",
    [{}, {"host_limit": 1 << 30}, {"host_limit": 1 << 17}, {"spill_dir": ""}, {"verify": True}],
    ids=str,
)
@pytest.mark.parametrize("codec", ["nvcomp-lz4", "nvcomp-ans"])
def test_every_bit_comes_back(machine, codec, options, tmp_path):
    """ANS cannot be written as a stream; what is spilled is a payload of this process."""
    if "spill_dir" in options:
        options = {"spill_dir": tmp_path, "host_limit": 1 << 16}
    engine = engine_of(machine, codec, **options)
    kinds = [step(machine, engine) for _ in range(3)]
    assert kinds[0] == {PackedView}
    assert kinds[2] == {PackedView if "verify" in options else Away}
    stats = engine.stats
    assert used(engine) == {codec}
    assert stats.by_codec[codec].encoded < stats.by_codec[codec].raw
    assert not [what for what in stats.fallbacks_by_reason if what.startswith("nvcomp")]
    assert (stats.peak_disk_bytes > 0) is ("spill_dir" in options)
    engine.close()


def test_auto_takes_it_where_it_is_cheapest(machine):
    engine = engine_of(machine)
    for _ in range(3):
        step(machine, engine)
    assert used(engine) <= {"nvcomp-ans"}
    assert engine.stats.by_codec["nvcomp-ans"].raw >= 2 * N * 2 * NUMEL
    assert not engine.stats.fallbacks_by_reason
    explained = [e for e in engine.explain() if e.codec == "nvcomp-ans"]
    assert all(e.measured[0].codec == "nvcomp-ans" for e in explained)
    assert all(e.measured[0].ratio > 1.2 for e in explained)


def wrong(codec, _array, data_type="", out=None, decompression_config=None):
    out.zero_()


def fails(*_args, **_options):
    raise RuntimeError("code=1000")


@pytest.mark.parametrize("broken", [("decode", fails), ("decode", wrong), ("encode", fails)])
def test_one_that_does_not_give_the_bytes_back_is_not_used(machine, monkeypatch, caplog, broken):
    monkeypatch.setattr(FakeCodec, *broken)
    engine = engine_of(machine, "auto")
    with caplog.at_level(logging.WARNING, "cswap"):
        for _ in range(12):
            step(machine, engine)
    stats = engine.stats
    assert not any(name.startswith("nvcomp") for name in used(engine))
    (told,) = [r.getMessage() for r in caplog.records if "nvcomp-ans:e" in r.getMessage()]
    words = "code=1000" if broken[1] is fails else "what it decodes is not what it encoded"
    assert f"nvCOMP has failed on torch.bfloat16 ({words})" in told
    failed = {what: n for what, n in stats.fallbacks_by_reason.items() if what.startswith("nvcomp")}
    assert failed
    assert set(failed.values()) == {1}  # each of its codecs, and not in each step
    assert all(what.endswith(":encode") for what in failed)
    assert not any(e.codec.startswith("nvcomp") for e in engine.explain())


def test_a_named_one_that_fails_is_counted_and_tensors_go_raw(machine, monkeypatch):
    monkeypatch.setattr(FakeCodec, "decode", wrong)
    engine = engine_of(machine, "nvcomp-lz4")
    for _ in range(2):
        step(machine, engine)
    assert used(engine) == {"raw"}
    assert sum(engine.stats.fallbacks_by_reason.values()) == 2 * N
    assert engine.stats.fallbacks_by_reason["nvcomp-lz4:encode"] == 1


def test_an_encode_that_fails_once_in_a_slot_is_made_again_on_the_general_way(machine, monkeypatch):
    engine = engine_of(machine, "nvcomp-lz4")
    step(machine, engine)
    encode, times = FakeCodec.encode, iter([True])

    def once(codec, *args, **options):
        return fails() if next(times, False) else encode(codec, *args, **options)

    monkeypatch.setattr(FakeCodec, "encode", once)
    assert step(machine, engine) == {Away, PackedView}
    assert next(times, False) is False  # it has failed
    assert engine.stats.fallbacks_by_reason == {}
    assert engine.stats.by_codec["nvcomp-lz4"].raw == 2 * N * 2 * NUMEL


def test_where_a_size_cannot_be_read_the_tensor_is_stored_raw(machine, monkeypatch):
    engine = engine_of(machine)
    for _ in range(2):
        step(machine, engine)
    before = engine.stats.by_codec["nvcomp-ans"]
    monkeypatch.setattr(FakeArray, "buffer_size", property(fails))
    for _ in range(2):
        step(machine, engine)
    after = engine.stats.by_codec["nvcomp-ans"]
    assert after.encoded - before.encoded == after.raw - before.raw
    assert engine.stats.fallbacks_by_reason["nvcomp-ans:encode"]
    assert after.raw - before.raw <= N * 2 * NUMEL  # of one step at most


def test_no_memory_for_the_proof_is_no_verdict(machine, monkeypatch):
    decode, times = FakeCodec.decode, iter([True])

    def once(codec, *args, **options):
        if next(times, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        decode(codec, *args, **options)

    monkeypatch.setattr(FakeCodec, "decode", once)
    codec = get_codec("nvcomp-lz4")
    assert isinstance(codec, NvcompCodec)
    with pytest.raises(torch.OutOfMemoryError):
        codec._trust.prove(torch.float32, torch.device("cpu"))
    codec._trust.prove(torch.float32, torch.device("cpu"))
    assert not codec._trust.failed


def test_a_broken_library_is_counted_once_by_the_engine(machine, monkeypatch, caplog):
    monkeypatch.setattr(machine.nvcomp, "__version__", "5.1.0")
    monkeypatch.setattr(vars(live_costs.LiveCosts)["lossless"], "func", as_on_cuda)
    assert nvcomp_library.failure()
    engine = engine_of(machine)
    with caplog.at_level(logging.WARNING, "cswap"):
        for _ in range(3):
            step(machine, engine)
    assert engine.stats.fallbacks_by_reason == {"nvcomp": 1}
    (record,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("nvcomp")]
    assert "5.1.0 is installed" in record
    assert not any(name.startswith("nvcomp") for name in used(engine))


LOSSLESS = vars(live_costs.LiveCosts)["lossless"].func


def as_on_cuda(costs):
    costs._kind, kind = "cuda", costs._kind
    found = LOSSLESS(costs)
    costs._kind = kind
    return found


class Smallest:
    """A goal that takes the way of nvCOMP wherever the advisor offers one."""

    def __init__(self):
        self.took: deque[tuple[int, int, float]] = deque()
        self.offered: list[set[str]] = []

    def choose(self, tensor, handle, again_s, candidates):
        names = {c.codec for c in candidates()}
        self.offered.append(names)
        return Choice("nvcomp-ans")

    def keeps(self, tensor, scope):
        return False

    def enter(self):
        return None

    def nothing(self, *_args, **_options):
        pass

    begin_step = packed = settle = used = unpacked = missed = nothing


def test_a_goal_is_offered_them_and_refused_what_has_failed(machine):
    engine, goal = engine_of(machine), Smallest()
    engine.choose_by(goal)
    step(machine, engine)
    assert used(engine) == {"nvcomp-ans"}
    assert all({"nvcomp-ans", "nvcomp-lz4", "raw"} <= names for names in goal.offered)
    codec = get_codec("nvcomp-ans")
    assert isinstance(codec, NvcompCodec)
    codec._trust.lose(torch.bfloat16, RuntimeError("code=1000"))
    step(machine, engine)
    assert engine.stats.by_codec["raw"].raw == N * 2 * NUMEL
    assert engine.stats.fallbacks_by_reason == {"nvcomp-ans:choice": N}


def test_a_plan_may_name_one(machine):
    plan = Plan({i: Decision("swap", "nvcomp-cascaded") for i in range(N)})
    engine = engine_of(machine, plan=plan)
    step(machine, engine)
    assert used(engine) == {"nvcomp-cascaded"}


def test_threads_wait_for_the_proof_of_another(machine, monkeypatch):
    """Else the second one's tensor would be encoded before it is known that decodes fail."""
    began, go = threading.Event(), threading.Event()

    def slow(*_args, **_options):
        began.set()
        go.wait(10)
        fails()

    monkeypatch.setattr(FakeCodec, "decode", slow)
    codec, ends = get_codec("nvcomp-lz4"), []
    assert isinstance(codec, NvcompCodec)

    def work():
        try:
            codec._trust.prove(torch.float32, torch.device("cpu"))
        except UnsupportedError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    threads[0].start()
    assert began.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    go.set()
    for thread in threads:
        thread.join(10)
    assert len(ends) == 2
    assert all("has failed on torch.float32 (code=1000)" in end for end in ends)
