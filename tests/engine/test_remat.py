"""Saved tensors that the engine computes again instead of storing them."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import cswap
from cswap.advisor.call_site import Site
from cswap.codecs.tolerance import EXACT
from cswap.engine.order.looks import EARLY
from cswap.engine.saved.packed import Token
from cswap.engine.trials import Trial
from tests.engine.engines import assert_empty

N = 1 << 15


pytestmark = pytest.mark.usefixtures("_chains_take_no_time", "by_price")


class Block(torch.nn.Module):
    """A transformer's block."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2)
            for y in self.qkv(self.norms[0](x)).split(d, 2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def blocks():
    return torch.nn.Sequential(*(Block(64, 4) for _ in range(3)))


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.sampled
@pytest.mark.parametrize("codec", ["auto", "zvc"])
def test_gradients_are_bit_equal_and_less_is_held(codec):
    model, x = blocks(), torch.randn(8, 64, 64)
    want = gradients(model, x)
    peaks = {}
    for remat in (False, True):
        with cswap.install(model, min_bytes=0, codec=codec, remat=remat) as handle:
            for _ in range(4):
                got = gradients(model, x)
                assert all(map(torch.equal, got, want))
            stats = handle.stats
            assert stats.fallbacks == 0
            assert ("remat" in stats.by_codec) == remat
            peaks[remat] = stats.peak_saved_bytes
            assert_empty(handle.engine)
    assert peaks[True] < 0.85 * peaks[False]


def test_the_memory_itself_is_gone_between_forward_and_backward():
    up, act, down = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    model, storages = torch.nn.Sequential(up, act, down), []
    act.register_forward_hook(
        lambda _m, _i, y: storages.append(StorageWeakRef(y.untyped_storage()))
    )
    x = torch.randn(1024, 64)
    for remat in (False, True):
        with cswap.install(model, min_bytes=0, remat=remat):
            for _ in range(2):
                loss = model(x).sum()
                gone = storages[-1].expired()
                loss.backward()
        assert gone == remat


def pass_through(engine, loss):
    with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
        return loss()


def test_a_chain_that_a_busy_machine_has_timed_is_timed_once_more(monkeypatch):
    seconds = [3.0]
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: seconds[0])
    nothing_pays = SimpleNamespace(codec=None, learns=False)
    monkeypatch.setattr("cswap.advisor.advisor.Advisor.choose", lambda *_, **__: nothing_pays)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 1))
    x = torch.randn(64, 64)
    wanted = gradients(model, x)
    with cswap.install(model, min_bytes=0) as handle:
        for _ in range(EARLY[0]):
            gradients(model, x)
        assert "remat" not in handle.stats.by_codec
        seconds[0] = 1e-6
        assert all(map(torch.equal, wanted, gradients(model, x)))
        assert handle.stats.by_codec["remat"].count == 1


def test_a_chain_that_does_not_give_the_bits_is_not_used(caplog):
    w = torch.randn(64, 64, requires_grad=True)
    h = torch.randn(512, 64, requires_grad=True)

    def loss():
        y = functional.gelu(h * 1.0)
        y.data.mul_(2)  # behind autograd's back
        return (y @ w).sum()

    (want,) = torch.autograd.grad(loss(), w)
    with cswap.swapping(min_bytes=0) as engine:
        for _ in range(3):
            (got,) = torch.autograd.grad(loss(), w)
            assert torch.equal(got, want)
    assert "remat" not in engine.stats.by_codec


def test_an_input_that_was_modified_raises_as_without_hooks():
    w = torch.randn(64, 64, requires_grad=True)
    with cswap.swapping(min_bytes=0) as engine:
        for modify in (False, True):
            h = torch.randn(512, 64, requires_grad=True) * 1.0
            result = (functional.gelu(h) @ w).sum()
            if modify:
                with torch.no_grad():
                    h.mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    result.backward()
            else:
                result.backward()
    assert engine.stats.by_codec["remat"].count == 2


def test_retained_graphs_and_second_derivatives_compute_it_each_time():
    w = torch.randn(64, 64, requires_grad=True)
    h = torch.randn(512, 64, requires_grad=True)

    def second():
        loss = (functional.silu(h) @ w).square().sum()
        (first,) = torch.autograd.grad(loss, w, create_graph=True)
        again = torch.autograd.grad(loss, w, retain_graph=True)[0]
        return first, again, *torch.autograd.grad(first.square().sum(), (w, h))

    want = second()
    with cswap.swapping(min_bytes=0) as engine:
        for _ in range(2):
            assert all(map(torch.equal, second(), want))
    assert engine.stats.by_codec["remat"].count > 0
    del want
    gc.collect()
    assert_empty(engine)


def test_what_must_be_exact_is_not_computed_from_what_may_be_lossy():
    w = torch.randn(64, 64, requires_grad=True)

    def loss(h):
        return (functional.gelu(h @ w).softmax(-1) @ w).sum()

    x = torch.randn(512, 64)
    with cswap.swapping(min_bytes=0, lossy="int8", guard_every=0) as engine:
        loss(x).backward()
    for token in engine._state.aliases.live():
        assert isinstance(token, Token)
        if token.remat is not None:
            assert token.handle.tolerance >= max(
                [p.token.handle.tolerance for p in token.remat.inputs if hasattr(p, "token")],
                default=EXACT,
            )


class NormOf(torch.nn.Module):
    """A norm and a product, of a product or of an activation that int8 may take."""

    def __init__(self, *, activation: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 64)
        self.act = torch.nn.GELU() if activation else torch.nn.Identity()
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, x):
        return self.second(self.norm(self.act(self.first(x))))


@pytest.mark.parametrize("activation", [False, True])
def test_norms_are_computed_again_from_inputs_of_two_bytes_and_from_no_coarser_ones(activation):
    torch.manual_seed(0)
    model, x = NormOf(activation=activation), torch.randn(1024, 64)
    parameters = dict(model.named_parameters())

    def gradients_of_all():
        return torch.autograd.grad(model(x).square().sum(), tuple(parameters.values()))

    want = gradients_of_all()
    # A byte's price is high enough for fp16 on a busy machine, too.
    options: dict[str, Any] = {"lossy": "int8", "guard_every": 0, "slowdown": 20.0}
    with cswap.install(model, **options) as handle:
        for _ in range(6):
            got = gradients_of_all()
        chosen = {e.site.scope: e.codec for e in handle.engine.explain()}
    # The input of GELU is coarse. What GELU makes of it is the norm's input, which has to be fine.
    assert chosen["norm"].endswith("fp16")  # or zvc+fp16, by the time that they take here
    assert handle.stats.by_codec["remat"].count > 0  # the norm's output
    for name, mine, its in zip(parameters, got, want, strict=True):
        error = 0.0005 if name == "norm.weight" else 0.01
        assert (mine - its).norm() <= error * its.norm()


def test_explanations_and_statistics_name_it():
    model, x = blocks(), torch.randn(8, 64, 64)
    with cswap.install(model, min_bytes=0) as handle:
        gradients(model, x)
        gradients(model, x)
    (stats,) = [handle.stats.by_codec["remat"]]
    assert stats.count > 0
    found = [e for e in handle.engine.explain() if e.codec == "remat"]
    assert found
    assert "computed again" in str(found[0])
    assert [c.codec for c in found[0].candidates] == ["remat", "keep"]


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("CSWAP_REMAT", "0")
    model, x = blocks(), torch.randn(8, 64, 64)
    with cswap.install(model, min_bytes=0) as handle:
        gradients(model, x)
    assert "remat" not in handle.stats.by_codec
    assert not cswap.SwapConfig(remat=False).remat
    with pytest.raises(cswap.ConfigError, match="remat"):
        cswap.SwapConfig(remat="perhaps")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"policy": "static:zvc"}, {"plan": {"version": 1}}, {"verify": True}], ids=str
)
def test_policies_that_are_compared_plans_and_checksums_do_without(options):
    model, x = blocks(), torch.randn(8, 64, 64)
    with cswap.install(model, min_bytes=0, **options) as handle:
        gradients(model, x)
    assert "remat" not in handle.stats.by_codec


def test_a_chain_that_disagrees_once_is_used_nowhere_in_its_scope(monkeypatch):
    saved = SimpleNamespace(
        site=Site("scope"), position=0, place=(0, 0, 0), tolerance=0, raw_nbytes=1 << 20
    )
    token: Any = SimpleNamespace(
        handle=saved,
        remat=SimpleNamespace(formula=SimpleNamespace(operator="gelu", layout=None)),
        lane=SimpleNamespace(device=SimpleNamespace(kind="cpu")),
    )
    with cswap.install(torch.nn.GELU()) as handle:
        recomputer = handle.engine._state.recomputer
        monkeypatch.setattr(recomputer.trials, "_try", lambda *_: Trial(agrees=True, seconds=1e-6))
        assert recomputer.is_worth(token)
        refused = Trial(agrees=False, seconds=1e-6, differs=True)
        monkeypatch.setattr(recomputer.trials, "_try", lambda *_: refused)
        assert recomputer.is_worth(token)  # it was tried
        assert not recomputer.is_worth(token, fresh=True)
        assert not recomputer.is_worth(token)


class Branches(nn.Module):
    """The same operators twice in one module; into the result of the second one it writes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(64, 64))
        self.into, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

    def branch(self, h, *, writes):
        z = h * self.scale
        if writes:
            with torch.no_grad():
                z[:, ::2] = 0
        return self.out(functional.relu(z))

    def forward(self, x):
        h = self.into(x)
        return self.branch(h, writes=False) + self.branch(h, writes=True)


def test_each_call_site_of_a_chain_is_tried_by_itself():
    torch.manual_seed(0)
    plain = Branches()
    model = copy.deepcopy(plain)
    with cswap.install(model, min_bytes=0, slowdown=10.0):
        for n in range(10):
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(n))
            for one in (plain, model):
                one.zero_grad()
                one(x).square().mean().backward()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None
                assert other.grad is not None
                assert torch.equal(mine.grad, other.grad)


def test_where_all_have_to_decide_alike_no_measured_rate_counts(monkeypatch):
    asked = []

    def rate(_device, *, assumed):
        asked.append(assumed)
        return 1e12

    monkeypatch.setattr("cswap.engine.trials.memory_rate", rate)
    monkeypatch.setattr("cswap.engine.trials.must_agree", lambda *, lossy: not lossy)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with cswap.install(model, min_bytes=0):
        model(torch.randn(64, 64)).sum().backward()
    assert asked
    assert all(asked)


def test_a_freed_argument_is_an_error_and_no_crash():
    """A backward of a part of the graph does not run the norm, which holds the argument."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(64, 64, 1), nn.BatchNorm1d(64)

        def forward(self, x):
            h = x * 1.5
            y = h + self.norm(self.conv(h))
            return h, y, y.sin().sum()

    model, x = Net(), torch.randn(32, 64, 128, requires_grad=True)
    with cswap.install(model, min_bytes=0) as handle:
        for _ in range(3):
            model(x)[2].backward()
        assert handle.stats.by_codec["remat"].count > 0
        h, y, loss = model(x)
        h.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="has been freed"):
            torch.autograd.grad(loss, y)
