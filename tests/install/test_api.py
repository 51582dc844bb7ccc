"""The public API as users call it, and what bad input says before anything runs."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap import ConfigError, CswapError, SwapConfig, UnknownCodecError, hook_stack
from cswap.advisor.rates import PRICES_S_PER_BYTE
from cswap.config import parse_bytes


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())


def grads(net, x):
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


X = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
ALL: dict[str, Any] = {"min_bytes": 0, "codec": "zvc"}


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_install_on_a_model_swaps_what_it_saves_until_removed():
    net = model()
    expected = grads(net, X)
    handle = cswap.install(net, **ALL)
    for _ in range(3):
        assert equal(grads(net, X), expected)
    assert handle.stats.swapped >= 3
    handle.remove()
    handle.remove()
    packed = handle.stats.packed
    assert equal(grads(net, X), expected)
    assert handle.stats.packed == packed
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_install_without_a_model_swaps_loss_functions_too():
    net = model()
    with cswap.install(**ALL) as handle:
        grads(net, X)
    inside = handle.stats.packed
    with cswap.install(net, **ALL) as other:
        grads(net, X)
    assert inside > other.stats.packed  # square() saves the output
    grads(net, X)
    assert handle.stats.packed == inside


def test_swapping_is_scoped_and_backward_may_come_later():
    net = model()
    expected = grads(net, X)
    net.zero_grad()
    with cswap.swapping(budget="2GiB", **ALL) as engine:
        loss = net(X).square().sum()
    loss.backward()
    assert equal([p.grad for p in net.parameters()], expected)
    assert engine.stats.packed > 0
    assert engine.config.budget == 2 << 30


def test_a_handle_removed_under_other_hooks_leaves_them_alone():
    seen = []
    handle = cswap.install(**ALL)

    def look(t):
        seen.append(1)
        return t

    with torch.autograd.graph.saved_tensors_hooks(look, lambda t: t):
        handle.remove()
        model()(X)
        before = len(seen)
    assert before > 0
    packed = handle.stats.packed
    grads(model(), X)  # the pair that is left on the stack passes tensors through, and goes
    assert handle.stats.packed == packed
    assert hook_stack.top(True) is None


def test_stats_have_every_field_and_print_as_a_table():
    with cswap.install(**ALL) as handle:
        grads(model(), X)
    stats = handle.stats
    data = stats.to_dict()
    expected = {
        "packed", "swapped", "deduplicated", "kept_by_reason", "raw_bytes", "encoded_bytes",
        "ratio", "by_codec", "peak_device_bytes", "peak_host_bytes", "prefetch_hits",
        "prefetch_misses", "exposed_s", "fallbacks",
    }  # fmt: skip
    assert expected <= set(data)
    assert dataclasses.is_dataclass(stats)
    json.dumps(data)
    assert stats.ratio == stats.raw_bytes / stats.encoded_bytes > 1
    assert {"count", "raw", "encoded", "encode_s", "decode_s"} == set(data["by_codec"]["zvc"])
    assert stats.packed == stats.swapped + stats.deduplicated + sum(stats.kept_by_reason.values())
    text = str(stats)
    assert "codec zvc" in text
    assert "kept: parameter" in text
    assert (stats.device_bytes, stats.host_bytes) == (0, 0)


def test_explain_says_why():
    with cswap.install(min_bytes=0) as handle:
        grads(model(), X)
    explanations = handle.engine.explain()
    assert explanations
    assert all(e.reason and e.codec for e in explanations)


def test_environment_overrides_defaults_never_arguments(monkeypatch):
    monkeypatch.setenv("CSWAP_MIN_BYTES", "1MiB")
    monkeypatch.setenv("CSWAP_VERIFY", "true")
    monkeypatch.setenv("CSWAP_LOSSY", "0.01")
    assert SwapConfig.resolve().min_bytes == 1 << 20
    assert SwapConfig.resolve(min_bytes="2KiB").min_bytes == 2048
    assert SwapConfig.resolve().verify is True
    assert SwapConfig.resolve().lossy == 0.01
    monkeypatch.setenv("CSWAP_BUDGET", "lots")
    with pytest.raises(ConfigError, match="CSWAP_BUDGET='lots'"):
        cswap.install()
    with pytest.raises(dataclasses.FrozenInstanceError):
        SwapConfig.resolve(budget=1).budget = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("64KiB", 65536),
        ("1.5GiB", 3 << 29),
        ("2 MB", 2_000_000),
        (7, 7),
        ("3b", 3),
        ("2G", 2 << 30),
        ("64k", 1 << 16),
        ("1.5M", 3 << 19),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text, "budget") == nbytes


def test_a_variable_that_is_no_option_is_told_once_with_the_nearest_name(monkeypatch, caplog):
    monkeypatch.setenv("CSWAP_BUGDET", "2GiB")
    monkeypatch.setenv("CSWAP_CACHE_DIR", "/tmp/elsewhere")
    for _ in range(2):
        SwapConfig.resolve()
    assert caplog.text.count("CSWAP_BUGDET is set, and is no option of cswap") == 1
    assert "Did you mean CSWAP_BUDGET?" in caplog.text
    assert "CACHE_DIR" not in caplog.text


def test_options_in_the_place_of_the_configuration_are_refused():
    with pytest.raises(ConfigError, match="config='int8'"):
        cswap.install(model(), "int8")  # type: ignore[arg-type]


BAD = [
    ({"codec": "zcv"}, UnknownCodecError, "Did you mean 'zvc'"),
    ({"codec": 3}, ConfigError, "codec=3"),
    ({"codec": {"int64": "int8"}}, ConfigError, "never for integers"),
    ({"codec": {"float32": "nope"}}, UnknownCodecError, "nope"),
    ({"codec": "bitpack", "lossy": "int8"}, ConfigError, "takes no floating"),
    ({"lossy": "int9"}, ConfigError, "int8"),
    ({"lossy": 0.0}, ConfigError, "between 0 and 1"),
    ({"lossy": float("nan")}, ConfigError, "lossy=nan"),
    ({"budget": "much"}, ConfigError, "budget='much'"),
    ({"budget": -1}, ConfigError, "budget=-1"),
    ({"budget": True}, ConfigError, "budget=True"),
    ({"keep_last": -1}, ConfigError, "keep_last=-1"),
    ({"workers": 2}, ConfigError, "workers: no such option. Known: codec"),
    ({"verify": "maybe"}, ConfigError, "verify='maybe'"),
    ({"exclude": 3}, ConfigError, "exclude=3"),
    ({"spill_dir": "/nowhere/at/all"}, ConfigError, "existing, writable directory"),
    ({"spill_limit": "1GiB"}, ConfigError, "spill_limit: no such option"),
    ({"bugdet": 1}, ConfigError, "Did you mean 'budget'"),
    ({"plan": {"version": 99}}, ConfigError, "plan.version=99"),
    ({"plan": "/no/such/plan.json"}, ConfigError, "cannot be read"),
    ({"plan": {"version": 1, "decisions": {"a": {}}}}, ConfigError, "position"),
    ({"plan": {"version": 1, "decisions": {"0": {"action": "burn"}}}}, ConfigError, "keep, swap"),
    (
        {"plan": {"version": 1, "decisions": {"0": {"action": "swap", "codec": "zcv"}}}},
        ConfigError,
        r"plan.decisions\[0\].*zvc",
    ),
    ({"config": "fast"}, ConfigError, "must be a SwapConfig"),
]


@pytest.mark.parametrize(("options", "error", "says"), BAD)
def test_bad_options_are_refused_before_anything_runs(options, error, says):
    net = model()
    for call in (lambda: cswap.install(net, **options), lambda: cswap.install(**options)):
        with pytest.raises(error, match=says) as caught:
            call()
        assert isinstance(caught.value, CswapError)
    with pytest.raises(error, match=says), cswap.swapping(**options):
        pass
    assert not any(m._forward_hooks for m in net.modules())
    assert hook_stack.top(True) is None


def test_a_model_that_is_none():
    with pytest.raises(ConfigError, match="model=str"):
        cswap.install("model")  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_spill_directory_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="writable"):
        cswap.install(spill_dir=tmp_path)


def test_a_disk_that_is_full_costs_memory_not_gradients(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    net = model()
    expected = grads(net, X)
    monkeypatch.setattr(os, "pwrite", full)
    with cswap.install(net, host_limit=0, spill_dir=tmp_path, **ALL) as handle:
        assert equal(grads(net, X), expected)
    assert handle.stats.fallbacks >= 1
    assert set(handle.stats.fallbacks_by_reason) == {"disk"}


def test_a_codec_function_that_raises_costs_a_fallback_and_is_named(caplog):
    def choose(_profile):
        raise KeyError("oops")

    net = model()
    expected = grads(net, X)
    with cswap.install(net, codec=choose, min_bytes=0) as handle:
        assert equal(grads(net, X), expected)
    assert "choose: KeyError: 'oops'" in caplog.text
    assert handle.stats.fallbacks_by_reason == {"advisor": handle.stats.fallbacks}
    assert handle.stats.fallbacks > 0


@pytest.mark.parametrize(("budget", "told"), [("1MiB", 1), (None, 0)])
def test_a_budget_on_a_cpu_is_said_to_gain_nothing(budget, told, caplog):
    with cswap.install(model(), budget=budget):
        pass
    assert sum("on a CPU: host memory is device memory" in text for text in caplog.messages) == told


def test_a_codec_function_may_keep_a_tensor():
    net = model()
    expected = grads(net, X)
    with cswap.install(net, codec=lambda _: "keep", min_bytes=0, remat=False) as handle:
        for _ in range(3):
            assert equal(grads(net, X), expected)
    stats = handle.stats
    assert (stats.swapped, stats.fallbacks) == (0, 0)
    assert stats.kept_by_reason["does_not_pay"] > 0


def test_spilled_encodings_have_no_file_that_others_see(tmp_path):
    net = model()
    expected = grads(net, X)
    with cswap.install(net, host_limit=0, spill_dir=tmp_path, **ALL) as handle:
        net.zero_grad()
        loss = net(X).square().sum()
        assert list(tmp_path.iterdir()) == []
        assert (spilled := handle.stats.disk_bytes) > 0
        loss.backward()
        del loss
        assert handle.stats.disk_bytes == 0
        assert handle.stats.peak_disk_bytes == spilled
    assert equal([p.grad for p in net.parameters()], expected)


def test_without_room_on_the_host_the_log_says_that_tensors_stay(caplog):
    net = model()
    with cswap.install(net, host_limit=0, **ALL):
        net(X).square().sum().backward()
    said = "host_limit failed (full, and no spill_dir); such tensors stay on the device"
    assert sum(said in record.message for record in caplog.records) == 1
    assert "slower path" not in caplog.text


def test_exclude_and_include_by_class_and_glob():
    net = nn.Sequential(nn.Linear(64, 64), model())
    expected = grads(net, X)
    with cswap.install(net, exclude=["1"], **ALL) as handle:
        assert equal(grads(net, X), expected)
    assert handle.stats.kept_by_reason["excluded"] > 0
    with cswap.install(net, include=[nn.ReLU], **ALL) as handle:
        assert equal(grads(net, X), expected)
    assert {e.site.kind for e in handle.engine.explain()} <= {"ReLU"}


def test_keep_last_keeps_the_newest():
    net = model()
    with cswap.install(net, keep_last=1, **ALL) as handle:
        grads(net, X)  # which shows which one is the newest
        assert "budget" not in handle.stats.kept_by_reason
        grads(net, X)
        assert handle.stats.kept_by_reason["budget"] == 1
        assert handle.stats.swapped >= 1


def test_a_plan_says_what_happens_to_each_tensor():
    plan = {
        "version": 1,
        "decisions": {"0": {"action": "keep"}, "1": {"action": "swap", "codec": "rle"}},
    }
    net = model()
    expected = grads(net, X)
    with cswap.install(net, plan=plan, min_bytes=0) as handle:
        assert equal(grads(net, X), expected)
    assert handle.stats.kept_by_reason["plan"] == 1
    assert handle.stats.by_codec["rle"].count == 1


def test_verify_mode_changes_nothing_but_time():
    net = model()
    expected = grads(net, X)
    with cswap.install(net, verify=True, **ALL):
        assert equal(grads(net, X), expected)


@pytest.mark.parametrize("lossy", ["int8", "fp8", "int4", "bf16", 0.01])
def test_lossy_gradients_are_close_and_repeatable(lossy, monkeypatch):
    monkeypatch.setitem(PRICES_S_PER_BYTE, "cpu", 1e-7)  # tensors this small are worth their hooks
    net = model()
    expected = grads(net, X)
    found = []
    for _ in range(2):
        with cswap.install(net, lossy=lossy, min_bytes=0) as handle:
            found.append(grads(net, X))
    assert any(n.split("+")[-1] not in ("zvc", "expk", "rle") for n in handle.stats.by_codec)
    assert equal(*found)
    for a, b in zip(expected, found[0], strict=True):
        assert (a - b).norm() <= (0.2 if lossy == "int4" else 0.05) * a.norm()


class Doubled(nn.Sequential):
    def forward(self, x):
        return super().forward(x).exp()


def test_tensors_saved_in_containers_and_their_children_have_their_scopes():
    net = nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.Identity(), nn.ReLU()), Doubled(nn.Linear(64, 64))
    )
    with cswap.install(net, **ALL) as handle:
        grads(net, X)
        scopes = {e.site.scope for e in handle.engine.explain()}
    assert {"0.2", "1"} <= scopes
    assert not {"0", "0.1"} & scopes
