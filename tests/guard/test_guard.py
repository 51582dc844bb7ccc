"""The accuracy guard: it sees damage, sends its class to a milder codec, and disturbs nothing."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import cswap
from cswap import ConfigError
from cswap.advisor.lossy_fallback import Milder, harshest
from cswap.codecs import registry
from cswap.codecs.raw import Raw
from cswap.codecs.registry import get_codec
from cswap.errors import UnsupportedError
from cswap.guard import guard as module
from cswap.guard.guard import make_guard
from cswap.guard.module_rerun import Call

if TYPE_CHECKING:
    from collections.abc import Iterator

ALL: dict[str, Any] = {"min_bytes": 0}
EVERY: dict[str, Any] = {**ALL, "guard_every": 1}


class Damaging(Raw):
    """Takes every value for its neighbour's."""

    name = "damaging"
    lossless = False
    verbatim = False

    def decode_flat(self, payload, out, *, stream):
        super().decode_flat(payload, out, stream=stream)
        out.copy_(out.roll(1))


class Poisoned(Damaging):
    """Makes the first value infinite."""

    name = "poisoned"

    def decode_flat(self, payload, out, *, stream):
        Raw.decode_flat(self, payload, out, stream=stream)
        out[0] = math.inf


class MaskOnly(Damaging):
    """Keeps which values are zero, and nothing else: enough for ReLU, not for what comes next."""

    name = "maskonly"

    def decode_flat(self, payload, out, *, stream):
        Raw.decode_flat(self, payload, out, stream=stream)
        out.copy_((out != 0).to(out.dtype))


@pytest.fixture(scope="module", autouse=True)
def _bad_codecs():
    # Only here: other tests go through all codecs that there are.
    bad = {"damaging": Damaging, "maskonly": MaskOnly, "poisoned": Poisoned}
    for name, codec in bad.items():
        cswap.register_codec(name, codec)
    yield
    for name in bad:
        del registry._registered[name]
        registry._made.pop(name, None)


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.up, self.gelu = nn.Linear(width, 4 * width), nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.project(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(self.gelu(self.up(self.second_norm(x))))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.1),
        nn.Conv2d(16, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1600, 10),
    )  # fmt: skip


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


IMAGES = torch.randn(16, 3, 24, 24, generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(128, 64, generator=torch.Generator().manual_seed(2))
TOKENS = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(3))


def train(net, x, steps, *, act=lambda _: None, **options):
    """The losses, and everything that training changes; the handle that was used."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses = []
    with cswap.install(net, **options) as handle:
        for step in range(steps):
            act(step)
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
            losses += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
    state = [t.clone() for t in (*net.parameters(), *net.buffers())]
    return [*losses, *state, torch.get_rng_state()], handle


def built(make):
    torch.manual_seed(7)
    return make()


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------- it sees and it acts


def test_a_damaging_codec_is_seen_and_its_class_goes_back_to_lossless(caplog):
    caplog.set_level(logging.DEBUG, "cswap")
    net = built(mlp)
    _, handle = train(net, ROWS, 12, codec="damaging", guard_every=4, **ALL)
    stats = handle.stats
    assert stats.guard_fallbacks == {
        "GELU: damaging -> lossless": 1,
        "Linear: damaging -> lossless": 1,
    }
    assert stats.guard_worst_error > 0.5
    assert stats.guard_worst_cosine < 0.9
    assert stats.fallbacks == 0
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert all("guard_error=0.25" in text for text in warnings)
    assert any("relative error" in r.getMessage() for r in caplog.records)
    text = str(stats)
    assert "guard: GELU: damaging -> lossless" in text
    assert "guard_worst_error" in text
    assert json.loads(json.dumps(stats.to_dict()))["guard_fallbacks"] == stats.guard_fallbacks


def test_after_the_fallback_gradients_are_exact_again():
    expected, _ = train(built(mlp), ROWS, 1, codec="raw", **ALL)
    net = built(mlp)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with cswap.install(net, codec="damaging", **EVERY) as handle:
        for _ in range(10):
            net.zero_grad()
            net(ROWS).square().mean().backward()
    assert handle.stats.guard_fallbacks
    assert equal(list(state.values()), list(net.state_dict().values()))
    found = [p.grad for p in net.parameters()]
    assert equal(expected[1 : 1 + len(found)], found)


def test_one_class_falls_back_and_the_others_stay():
    net = built(mlp)
    codec = {"1": "damaging", "0": "int8", "2": "int8"}
    _, handle = train(net, ROWS, 16, codec=codec, **EVERY)
    # The first Linear's input is its own; GELU's input was saved by GELU; its output by the last.
    assert handle.stats.guard_fallbacks == {"GELU: damaging -> lossless": 1}
    before = handle.stats.by_codec["int8"].count
    assert before >= 16


def test_a_module_whose_input_another_one_saved_first_is_checked_and_that_class_is_blamed():
    net = built(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    codec = {"0": "zvc", "1": "maskonly", "2": "zvc"}
    _, handle = train(net, ROWS, 8, codec=codec, **EVERY)
    assert handle.stats.guard_fallbacks == {"ReLU: maskonly -> lossless": 1}
    assert handle.stats.by_codec["maskonly"].count < 8


def test_no_number_where_there_was_one_is_the_largest_error():
    net = built(mlp)
    with cswap.install(net, codec="poisoned", **EVERY) as handle:
        for _ in range(10):  # without an optimizer: the first step would ruin the model
            net.zero_grad()
            net(ROWS).square().mean().backward()
    assert handle.stats.guard_worst_error == math.inf
    assert handle.stats.guard_worst_cosine == 1.0
    assert "Linear: poisoned -> lossless" in handle.stats.guard_fallbacks


def test_each_step_down_the_ladder_is_taken_once_and_never_back():
    net = built(mlp)
    _, handle = train(net, ROWS, 40, codec="int4", guard_error=1e-9, **EVERY)
    assert handle.stats.guard_fallbacks == {
        f"{kind}: {a} -> {b}": 1
        for kind in ("GELU", "Linear")
        for a, b in itertools.pairwise(("int4", "fp8", "int8", "bf16", "lossless"))
    }
    used = set(handle.stats.by_codec)
    assert {"int4", "fp8", "int8", "bf16"} <= used
    counts = {n: c.count for n, c in handle.stats.by_codec.items()}
    _, again = train(net, ROWS, 1, codec="int4", guard_error=1e-9, **EVERY)
    assert again.stats.by_codec["int4"].count > 0  # a new run begins anew
    assert counts["int4"] < 40


def test_trouble_shows_in_the_second_step():
    net = built(mlp)
    _, handle = train(net, ROWS, 3, codec="damaging", **ALL)  # the default: every 100
    assert handle.stats.guard_checks == 1
    assert len(handle.stats.guard_fallbacks) == 1


def test_what_failed_is_looked_at_again_at_once():
    _, handle = train(built(mlp), ROWS, 8, codec="int4", guard_error=1e-9, **ALL)
    kinds = {what.partition(":")[0] for what in handle.stats.guard_fallbacks}
    assert len(kinds) == 1
    assert len(handle.stats.guard_fallbacks) == 4


@pytest.mark.sampled
@pytest.mark.parametrize("lossy", ["int8", "bf16", "fp8"])
@pytest.mark.parametrize(("make", "x"), [(cnn, IMAGES), (Block, TOKENS)], ids=["cnn", "gpt"])
def test_usual_codecs_pass_with_a_small_error(make, x, lossy):
    _, handle = train(built(make), x, 12, codec=lossy, **EVERY)
    stats = handle.stats
    assert stats.guard_checks >= 9
    assert 0 < stats.guard_worst_error < 0.1
    assert stats.guard_worst_cosine > 0.99
    assert stats.guard_fallbacks == {}
    assert stats.fallbacks == 0


def test_every_class_has_its_turn(caplog):
    caplog.set_level(logging.DEBUG, "cswap")
    train(built(cnn), IMAGES, 12, codec="int8", **EVERY)
    checked = {r.args[0] for r in caplog.records if r.msg.startswith("guard: %s with")}
    kinds = {type(m).__name__ for n, m in cnn().named_modules() if n in checked}
    assert kinds >= {"Conv2d", "Linear", "ReLU"}


# ------------------------------------------------------------------- it disturbs nothing


@pytest.mark.sampled
@pytest.mark.parametrize("codec", ["zvc", "int8"])
@pytest.mark.parametrize(("make", "x"), [(cnn, IMAGES), (Block, TOKENS)], ids=["cnn", "gpt"])
def test_training_is_bit_equal_with_and_without(make, x, codec, monkeypatch):
    # Random numbers (dropout) and running statistics are among what is compared. A tensor that is
    # computed again has other values than one that a lossy codec held: a busy machine takes long.
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-5)
    off, without = train(built(make), x, 8, codec=codec, lossy="int8", guard_every=0, **ALL)
    on, handle = train(built(make), x, 8, codec=codec, lossy="int8", **EVERY)
    assert equal(off, on)
    assert without.stats.guard_checks == 0
    assert (handle.stats.guard_checks > 0) is (codec == "int8")


class Noisy(nn.Module):
    """Draws from every generator, counts, keeps things, and changes parameters in forward."""

    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.register_parameter("bias", None)
        self.plain = torch.zeros(())
        self.history: list[float] = []
        self.last: torch.Tensor | None = None
        self.count = 0

    def forward(self, x, *, scale=1.0):
        self.calls.add_(1)
        self.plain.add_(1)
        self.weight.data.mul_(0.99)
        self.count += 1
        self.history.append(random.random())
        noise = np.random.rand() + random.random() + torch.rand(())  # noqa: NPY002
        self.last = x @ (self.weight * scale) * noise
        return nn.functional.gelu(nn.functional.dropout(self.last, 0.1))


def test_what_forward_changes_is_changed_once_per_call():
    def run(every):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        net = built(lambda: nn.Sequential(Noisy(), nn.Linear(64, 64), Noisy()))
        found, handle = train(net, ROWS, 6, codec="int8", guard_every=every, **ALL)
        inner: Any = net[0]
        plain = [inner.calls.item(), inner.plain.item(), inner.count, inner.history]
        later = [random.random(), np.random.rand()]  # noqa: NPY002
        return found, plain + later, handle.stats

    off, changed, _ = run(0)
    on, changed_with, stats = run(1)
    assert equal(off, on)
    assert changed == changed_with
    assert changed[:3] == [6, 6, 6]
    assert stats.guard_checks == 4
    assert stats.fallbacks == 0


def test_hooks_of_others_run_once_per_call_and_none_stays():
    net, x = built(mlp), ROWS.clone().requires_grad_()
    calls: list[str] = []
    net[0].register_forward_hook(lambda *_: calls.append("forward"))
    net[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    before = len(net[0]._forward_hooks), len(net[0]._forward_pre_hooks)
    _, handle = train(net, x, 6, codec="int8", **EVERY)
    assert calls == ["forward", "backward"] * 6
    assert (len(net[0]._forward_hooks), len(net[0]._forward_pre_hooks)) == before
    assert handle.stats.guard_checks == 4


def test_gradients_of_parameters_are_never_touched():
    net = built(mlp)
    with cswap.install(net, codec="int8", **EVERY) as handle:
        for step in range(6):
            net.zero_grad()
            loss = net(ROWS).square().mean()  # the check of the step before runs here
            assert all(p.grad is None for p in net.parameters())
            loss.backward()
            assert handle.stats.guard_checks == max(0, step - 1)


def test_autocast_is_as_it_was():
    seen: list[tuple[torch.dtype, bool]] = []

    class Looks(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append((out.dtype, torch.is_grad_enabled()))
            return out

    net = nn.Sequential(Looks(64, 128), nn.GELU(), Looks(128, 64))
    with cswap.install(net, codec="int8", **EVERY) as handle:
        for step in range(8):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step < 5):
                loss = net(ROWS).float().square().mean()
            loss.backward()
            assert not torch.is_autocast_enabled("cpu")
    assert handle.stats.fallbacks == 0
    assert handle.stats.guard_checks > 0
    assert len(seen) > 16  # some ran again
    assert all(enabled for _, enabled in seen)
    assert {dtype for dtype, _ in seen} == {torch.bfloat16, torch.float32}


def test_nothing_is_left_behind():
    net = built(mlp)
    with cswap.install(net, codec="int8", **EVERY) as handle:
        losses = []
        for _ in range(8):
            losses.append(net(ROWS).square().mean())  # as people do who log them
            losses[-1].backward()
        gc.collect()
        calls = [x for x in gc.get_objects() if type(x) is Call]
        assert len(calls) <= 1
        del calls, losses
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is Call]
    assert handle.stats.device_bytes == 0


# -------------------------------------------------------------- when it cannot be done


class ReturnsADict(nn.Linear):
    def forward(self, x):
        return {"out": super().forward(x), "name": "linear"}


class TakesAnObject(nn.Linear):
    def forward(self, x, cache=None):
        return super().forward(x)


class NeverTheSame(nn.Linear):
    calls: Iterator[int] = itertools.count(1)

    def forward(self, x):
        return super().forward(x) * float(next(self.calls))


class OutOfMemory(nn.Linear):
    fail = False

    def forward(self, x):
        if self._is_replica_of_ours():
            raise torch.OutOfMemoryError("no memory")
        return super().forward(x)

    def _is_replica_of_ours(self):
        return getattr(self, "_is_replica", False)


class OwnObject:
    pass


class Wrapped(nn.Module):
    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


IMPOSSIBLE: dict[str, Any] = {
    "takes an object": (TakesAnObject, lambda m, x: m(x, cache=OwnObject())),
    "never the same": (NeverTheSame, lambda m, x: m(x)),
    "out of memory": (OutOfMemory, lambda m, x: m(x)),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_be_run_again_is_counted_once_and_left_alone(what, caplog):
    make, call = IMPOSSIBLE[what]

    def run(every):
        NeverTheSame.calls = itertools.repeat(3) if every is None else itertools.count(1)
        net = built(lambda: Wrapped(make(64, 64), call))
        return train(net, ROWS, 6, codec="int8", guard_every=every or 0, **ALL)

    found, handle = run(1)
    assert handle.stats.guard_checks == 0
    assert handle.stats.fallbacks_by_reason == {"guard": 1}
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "'inner'" in warnings[0]
    if make is not NeverTheSame:
        assert equal(found, run(0)[0])


def test_a_forward_replaced_on_the_instance_is_left_alone():
    net = built(mlp)
    inner: Any = net[0]
    inner.forward = inner.forward  # as accelerate does
    with pytest.raises(UnsupportedError, match="replaced"):
        Call(inner, (ROWS,), {})
    _, handle = train(net, ROWS, 8, codec="int8", **EVERY)
    assert handle.stats.fallbacks_by_reason == {"guard": 1}
    assert handle.stats.guard_checks > 0


def test_outputs_in_containers_and_several_of_them_are_fine():
    net = built(lambda: Wrapped(ReturnsADict(64, 64), lambda m, x: m(x)["out"]))
    _, handle = train(net, ROWS, 4, codec="int8", **EVERY)
    assert handle.stats.guard_checks == 2
    recurrent = built(lambda: Wrapped(nn.LSTM(64, 32, batch_first=True), lambda m, x: m(x)[0]))
    _, handle = train(recurrent, TOKENS, 4, codec="int8", **EVERY)
    assert handle.stats.guard_checks == 2
    assert 0 < handle.stats.guard_worst_error < 0.05
    assert handle.stats.fallbacks == 0


def test_an_error_in_the_guard_itself_ends_the_guard_not_training(monkeypatch):
    def broken(*_):
        raise KeyError("oops")

    expected, _ = train(built(mlp), ROWS, 5, codec="zvc", **ALL)
    monkeypatch.setattr(module.Guard, "_arm", broken)
    found, handle = train(built(mlp), ROWS, 5, codec="zvc", lossy="int8", **EVERY)
    assert equal(expected, found)
    assert handle.stats.fallbacks_by_reason == {"guard": 1}


def test_a_gradient_that_cannot_be_copied_is_no_gradient(monkeypatch):
    expected, _ = train(built(mlp), ROWS, 5, codec="int8", guard_every=0, **ALL)

    class Fails:
        @staticmethod
        def of(_):
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(module, "Copy", Fails)
    found, handle = train(built(mlp), ROWS, 5, codec="int8", **EVERY)
    assert equal(expected, found)
    assert handle.stats.guard_checks == 0


# --------------------------------------------------------------------------- when, and when not


def test_it_is_on_only_where_something_may_be_lossy_and_there_is_a_model():
    net = mlp()
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"codec": "zvc"}, False),
        ({"lossy": "int8"}, True),
        ({"codec": "int8"}, True),
        ({"codec": {"float32": "fp8"}}, True),
        ({"lossy": "int8", "guard_every": 0}, False),
    ]
    for options, on in cases:
        with cswap.install(net, **options) as handle:
            assert (make_guard(net, handle.engine) is not None) is on
            hooks, _recomputed = handle._installed
            assert (vars(hooks)["_guard"] is not None) is on


def test_steps_between_checks_do_nothing(monkeypatch):
    net = built(mlp)
    monkeypatch.setattr(module.Guard, "_advance", advance := counting(module.Guard._advance))
    with cswap.install(net, codec="int8", guard_every=50, **ALL) as handle:
        engine = handle.engine
        for step in range(1, 111):
            advance.step = step
            net(ROWS).square().mean().backward()
            watching = engine.observer.seen is not None
            assert watching is (step in (1, 2, 49, 50, 99, 100))
    assert advance.steps == [1, 2, 3, 49, 50, 51, 99, 100, 101]
    assert handle.stats.guard_checks == 3


class counting:  # noqa: N801 - stands for a method
    def __init__(self, method):
        self.method, self.steps, self.step = method, [], 0

    def __get__(self, instance, _owner):
        def call():
            self.steps.append(self.step)
            self.method(instance)

        return call


def test_it_looks_less_and_less_often_while_nothing_is_lossy(monkeypatch):
    net = built(mlp)
    monkeypatch.setattr(module.Guard, "_advance", advance := counting(module.Guard._advance))
    with cswap.install(net, codec="zvc", lossy="int8", guard_every=16, **ALL) as handle:
        for step in range(1, 60):
            advance.step = step
            net(ROWS).square().mean().backward()
    assert advance.steps == [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 47, 48]
    assert handle.stats.guard_checks == 0


def test_evaluation_between_steps_and_late_backward_are_waited_for():
    net = built(mlp)
    with cswap.install(net, codec="int8", **EVERY) as handle:
        for _ in range(4):
            losses = [net(ROWS).square().mean() for _ in range(3)]  # accumulation
            with torch.no_grad():
                net(ROWS)
            sum(losses).backward()
            with torch.inference_mode():
                net(ROWS)
    assert handle.stats.guard_checks >= 3
    assert handle.stats.fallbacks == 0


def test_gradients_that_never_come_are_given_up(monkeypatch):
    monkeypatch.setattr(module, "MAX_STEPS_UNTIL_BACKWARD", 3)
    net = built(mlp)
    with cswap.install(net, codec="int8", **EVERY) as handle:
        for _ in range(12):
            net(ROWS)
        assert handle.stats.guard_checks == 0
        for _ in range(6):
            net(ROWS).sum().backward()
    assert handle.stats.guard_checks > 0
    assert handle.stats.fallbacks == 0


def test_a_model_called_for_other_things_in_between_is_checked_all_the_same(monkeypatch):
    monkeypatch.setattr(module, "MAX_STEPS_UNTIL_BACKWARD", 4)
    net = built(mlp)
    with cswap.install(net, codec="int8", guard_every=10, **ALL) as handle:
        for _ in range(20):
            net(ROWS).sum().backward()
            net(ROWS)  # the second step, and every tenth: never a gradient
    assert handle.stats.guard_checks > 0


def test_a_model_that_is_one_module_and_checkpointed_models_are_fine():
    leaf = built(lambda: nn.Linear(64, 64))
    _, handle = train(leaf, ROWS, 8, codec="int8", **EVERY)
    assert handle.stats.guard_checks > 0

    for reentrant in (False, True):
        net = built(mlp)
        x = ROWS.clone().requires_grad_()

        def call(inner, x, reentrant=reentrant):
            run = torch.utils.checkpoint.checkpoint
            return run(inner, x, use_reentrant=reentrant)

        wrapped = nn.Sequential(nn.Linear(64, 64), Wrapped(net, call))
        _, handle = train(wrapped, x, 8, codec="int8", **EVERY)
        assert handle.stats.fallbacks == 0
        assert handle.stats.guard_checks > 0


def test_an_optimizer_inside_backward_changes_nothing():
    net = built(mlp)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: (p.data.sub_(p.grad), None)[1])
    with cswap.install(net, codec="damaging", **EVERY) as handle:
        for _ in range(4):
            net(ROWS).square().mean().backward()
    assert handle.stats.guard_fallbacks
    assert handle.stats.fallbacks == 0


@pytest.mark.parametrize("options", [{"keep_last": 1}, {"budget": 1 << 15}])
def test_with_a_window(options):
    found, handle = train(built(mlp), ROWS, 8, codec="int8", **{**EVERY, **options})
    off, _ = train(built(mlp), ROWS, 8, codec="int8", **{**ALL, **options, "guard_every": 0})
    assert handle.stats.guard_checks > 0
    assert handle.stats.fallbacks == 0
    assert equal(found, off)


def test_removing_ends_it():
    net = built(mlp)
    handle = cswap.install(net, codec="int8", **EVERY)
    for _ in range(3):
        net(ROWS).sum().backward()
    loss = net(ROWS).sum()
    handle.remove()
    loss.backward()
    checks = handle.stats.guard_checks
    for _ in range(3):
        net(ROWS).sum().backward()
    assert handle.stats.guard_checks == checks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_options_are_parsed():
    assert cswap.SwapConfig().guard_every == 100
    assert cswap.SwapConfig(guard_error="0.5").guard_error == 0.5  # type: ignore[arg-type]
    for bad in (0, -1, math.nan, math.inf, "much", True, None):
        with pytest.raises(ConfigError, match="guard_error="):
            cswap.SwapConfig(guard_error=bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="guard_every="):
        cswap.SwapConfig(guard_every=-1)


# ----------------------------------------------------------------------------- milder


def test_what_is_forbidden_is_replaced_by_the_next_that_takes_the_dtype():
    milder, x = Milder(), torch.zeros(8)
    assert milder.instead("zvc+int4", x, "Linear") == "zvc+int4"
    assert milder.forbid("Linear", "zvc+int4") == "fp8"
    assert milder.instead("zvc+int4", x, "Linear") == "zvc+fp8"
    assert milder.instead("int4", x, "Linear") == "fp8"
    assert milder.instead("int4", x, "Conv2d") == "int4"
    assert milder.forbid("Linear", "int8") == "bf16"
    assert milder.forbid("Linear", "fp8") == "bf16"
    assert milder.instead("int4", x, "Linear") == "bf16"
    assert milder.instead("int4", x.bfloat16(), "Linear") is None  # which bf16 does not take
    assert milder.forbid("Linear", "bf16") == "lossless"
    assert milder.instead("int4", x, "Linear") is None
    assert milder.instead("raw", x, "Linear") == "raw"


def test_candidates_are_replaced_too_where_they_can_be_priced():
    milder, x = Milder(), torch.zeros(8)
    offered = ("int8", "zvc+int8", "bf16")
    assert milder.among(offered, x, "Linear") == offered
    milder.forbid("Linear", "int8")
    assert milder.among(offered, x, "Linear") == ("bf16", "zvc+bf16")
    assert milder.among(offered, x, "ReLU") == offered
    milder.forbid("Linear", "bf16")
    assert milder.among(offered, x, "Linear") == ()


def test_the_advisor_explains_what_it_uses_instead():
    net = built(mlp)
    with cswap.install(net, codec="int4", guard_error=1e-9, **EVERY) as handle:
        for _ in range(30):
            net(ROWS).square().mean().backward()
    assert handle.stats.guard_fallbacks
    chosen = [e for e in handle.engine.explain() if e.site.scope]
    assert chosen
    assert all(e.codec in ("keep", "remat") or get_codec(e.codec).lossless for e in chosen)
    assert any("int4 harmed gradients" in e.reason for e in chosen)


def test_with_codecs_chosen_by_price_the_ladder_is_the_same():
    net = built(mlp)
    options = {**EVERY, "lossy": "int8", "guard_error": 1e-9, "budget": 0}
    with cswap.install(net, **options) as handle:
        for _ in range(30):
            net(ROWS).square().mean().backward()
    assert "Linear: int8 -> bf16" in handle.stats.guard_fallbacks
    assert not {"int8", "zvc+int8"} & {e.codec for e in handle.engine.explain()}


def test_the_harshest_goes_first():
    assert harshest(["bf16", "int4", "int8"]) == "int4"
    assert harshest(["int8", "damaging"]) == "damaging"
