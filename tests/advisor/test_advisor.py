"""The first advisor: predicted ratios, choices, what must stay exact, and reasons one can read."""

from __future__ import annotations

import math

import pytest
import torch

from cswap.advisor import advisor as module
from cswap.advisor import lossy_rules as rules
from cswap.advisor.advisor import Advisor
from cswap.advisor.call_site import Site
from cswap.advisor.candidates import foretold_ratio, lossy_candidates
from cswap.advisor.cost import candidate
from cswap.advisor.live_costs import KEEP, MARGIN
from cswap.codecs.registry import get_codec
from cswap.codecs.tolerance import COARSE, EXACT, FINE
from cswap.codecs.traits import CodecRate
from cswap.config import SwapConfig
from cswap.profiler import profile

N = 1 << 18


def relu(zeros, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, generator=generator).abs()
    return x * (torch.rand(N, generator=generator) >= zeros)


def choice(x, *, may_keep=True, tolerance=EXACT, site=None, planned=None, **options):
    advisor = Advisor(SwapConfig(**options), None)
    advice = advisor.choose(
        x, site or Site(), 0, tolerance=tolerance, may_keep=may_keep, planned=planned
    )
    codec = advice.codec
    return KEEP if codec is None else codec.name


def test_sparse_tensors_go_through_zvc_and_dense_ones_stay():
    assert choice(relu(0.6)).startswith("zvc")
    assert choice(torch.randn(N)) == KEEP


def test_where_it_may_not_stay_a_dense_tensor_is_moved_by_what_is_cheapest():
    assert choice(torch.randn(N), may_keep=False) in ("raw", "expk", "zvc+expk")
    noise = torch.randint(0, 256, (4 * N,), dtype=torch.uint8).view(torch.float32)
    assert choice(noise, may_keep=False) == "raw"


def test_masks_and_indices_are_packed():
    assert choice(torch.rand(N) < 0.7) == "bitpack"
    assert choice(torch.randint(0, 1000, (N,))) == "bitpack"


def test_a_lossy_codec_is_taken_only_where_it_is_allowed():
    dense = torch.randn(N)
    assert choice(dense, lossy="int8", tolerance=COARSE) == "int8"
    assert choice(dense, lossy="int8", tolerance=EXACT) == KEEP
    assert choice(relu(0.6), lossy="int8", tolerance=COARSE) == "zvc+int8"


def test_an_error_budget_admits_the_codecs_within_it():
    assert lossy_candidates("off") == ()
    assert lossy_candidates(0.01) == (
        *("bf16", "fp16", "int8"),
        *("zvc+bf16", "zvc+fp16", "zvc+int8"),
    )
    assert {"mxfp8", "zvc+mxfp8"} <= set(lossy_candidates(0.05))  # its error is 0.029
    assert "int4" not in lossy_candidates(0.05)
    assert "int4" in lossy_candidates(0.2)
    assert choice(torch.randn(N), lossy=0.01, tolerance=COARSE) == "int8"


@pytest.mark.parametrize(
    ("site", "tolerance"),
    [
        (Site(kind="CrossEntropyLoss"), EXACT),
        (Site(scope="layers.3.mlp.gate"), EXACT),
        (Site(scope="layers.3.mlp.gate_proj"), COARSE),
        (Site(operator="cross_entropy"), EXACT),
        (Site(producer="SoftmaxBackward0"), EXACT),
        (Site(producer="LogSoftmaxBackward0"), EXACT),
        (Site(kind="Linear", operator="linear", producer="GeluBackward0"), COARSE),
        (Site(kind="LayerNorm", producer="AddBackward0"), FINE),
        (Site(kind="BatchNorm2d", producer="ConvolutionBackward0"), FINE),
        (Site(operator="layer_norm", producer="AddmmBackward0"), FINE),
        (Site(kind="LlamaRMSNorm", producer="ToCopyBackward0"), FINE),
        (Site(kind="LlamaRMSNorm", producer="RsqrtBackward0"), EXACT),
        (Site(kind="LayerNorm", producer="NativeLayerNormBackward0"), EXACT),
        (Site(kind="LayerNorm"), EXACT),  # a leaf: it may be one of the statistics
        (Site(kind="Linear", producer="NativeLayerNormBackward0"), FINE),
        (Site(kind="Conv2d", producer="NativeBatchNormBackward0"), FINE),
        (Site(kind="Attention", producer="LinalgVectorNormBackward0"), EXACT),
        (Site(kind="Linear", producer="WeightNormInterfaceBackward0"), EXACT),
    ],
)
def test_training_forgives_no_error_a_small_one_or_any(site, tolerance):
    assert rules.tolerance_of(torch.randn(N), site) == tolerance


def test_inputs_of_norms_take_two_bytes_where_coarser_codecs_are_admitted():
    for lossy in ("int8", "int4", "bf16", "fp16", 0.01):
        assert choice(torch.randn(N), lossy=lossy, tolerance=FINE) == "fp16"
    for lossy in ("off", 0.0001):
        assert choice(torch.randn(N), lossy=lossy, tolerance=FINE) == KEEP
    assert choice(torch.randn(N), codec="int8", tolerance=FINE) == KEEP
    assert choice(torch.randn(N), codec="fp16", tolerance=FINE) == "fp16"
    assert choice(torch.randn(N) * 1e-4, lossy="int8", tolerance=FINE) == KEEP  # below its range


def test_integers_masks_and_small_tensors_stay_exact():
    assert rules.tolerance_of(torch.zeros(N, dtype=torch.int64), Site()) == EXACT
    assert rules.tolerance_of(torch.zeros(N, dtype=torch.bool), Site()) == EXACT
    assert rules.tolerance_of(torch.randn(100), Site()) == EXACT


def test_a_forced_codec_gives_way_where_it_cannot_serve():
    assert choice(torch.randn(N), codec="expk") == "expk"
    assert choice(torch.rand(N) < 0.5, codec="expk") == "bitpack"
    assert choice(torch.randn(N), codec="int8", tolerance=EXACT) == KEEP
    assert choice(torch.randn(N), codec={"float32": "zvc"}) == "zvc"
    assert choice(torch.randn(N), codec={torch.float32: "zvc"}) == "zvc"
    assert choice(torch.randn(N), codec=lambda p: "rle" if p.zero_fraction < 1 else "zvc") == "rle"
    assert choice(torch.randn(N), site=Site(codec="csr")) == "csr"
    assert choice(torch.randn(N), planned="rle", codec="zvc") == "rle"


@pytest.fixture
def samples(monkeypatch):
    """Counts the samples that the advisor takes."""
    taken = []

    def counted(x):
        taken.append(x)
        return profile(x)

    monkeypatch.setattr(module, "profile", counted)
    return taken


def test_a_choice_is_remembered_and_sampled_again_now_and_then(samples):
    advisor = Advisor(SwapConfig(), None)
    for step in range(16):
        advisor.begin_step(0.0, look=step - step % 12)
        advisor.choose(relu(0.6), Site(), 0, tolerance=EXACT, may_keep=True)
    assert len(samples) == 2
    advisor.choose(relu(0.6), Site(), 1, tolerance=EXACT, may_keep=True)
    assert len(samples) == 3


def test_another_ratio_brings_a_sample_at_the_next_use(samples):
    uses = []
    advisor = Advisor(SwapConfig(), None)
    for use in range(120):
        x, n = relu(0.6 if use < 100 else 0.9), len(samples)
        advice = advisor.choose(x, Site(), 0, tolerance=EXACT, may_keep=False)
        assert advice.codec is not None
        advice.note_encoded(advice.codec.name, x.nbytes, advice.codec.encode(x).nbytes)
        uses += [use] * (len(samples) - n)
    assert uses == [0, 101]  # the encoding's size said so


def test_explanations_name_site_profile_candidates_and_choice():
    advisor = Advisor(SwapConfig(), None)
    advisor.choose(relu(0.6), Site(scope="features.3"), 4, tolerance=EXACT, may_keep=True)
    (explanation,) = advisor.explain()
    assert explanation.position == 4
    assert explanation.profile is not None
    costs = [c.cost_s for c in explanation.candidates]
    assert costs == sorted(costs)
    assert explanation.codec == explanation.candidates[0].codec
    text = str(explanation)
    assert "features.3" in text
    assert explanation.codec in text
    assert "% zeros" in text


def test_a_gain_below_the_margin_is_not_taken():
    advisor = Advisor(SwapConfig(), None)
    advisor.choose(torch.randn(N), Site(), 0, tolerance=EXACT, may_keep=True)
    (explanation,) = advisor.explain()
    keep = next(c for c in explanation.candidates if c.codec == KEEP)
    assert explanation.candidates[0].cost_s > (1 - MARGIN) * keep.cost_s
    assert explanation.codec == KEEP


@pytest.mark.sampled
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        *("zvc", "csr", "expk", "expk:3", "expk:4", "zvc+expk", "bf16", "zvc+bf16"),
        *("int8", "zvc+int8", "int4", "zvc+int4", "mxfp8", "zvc+mxfp8"),
    ],
)
def test_predicted_ratio_is_close_to_the_true_one(name, dtype, zeros):
    x = relu(zeros).to(dtype)
    codec = get_codec(name)
    if not codec.supports(x.dtype):
        pytest.skip(f"{name} does not take {dtype}")
    predicted = foretold_ratio(codec, profile(x))
    assert predicted is not None
    assert math.isclose(predicted, max(1.0, codec.encode(x).ratio), rel_tol=0.15)


@pytest.mark.parametrize("zeros", [0.0, 0.9])
@pytest.mark.parametrize(
    ("name", "high"),
    [
        *(("bitpack", 2), ("bitpack", 100), ("bitpack", 5000)),
        *(("zvc+bitpack", 100), ("zvc+bitpack", 5000)),
    ],
)
def test_predicted_ratio_of_integers_is_close_to_the_true_one(name, high, zeros):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, high, (N,), generator=generator)
    x *= torch.rand(N, generator=generator) >= zeros
    predicted = foretold_ratio(get_codec(name), profile(x))
    assert predicted is not None
    assert math.isclose(predicted, get_codec(name).encode(x).ratio, rel_tol=0.15)


def test_cost_is_time_plus_price_times_bytes():
    device_s = CodecRate(1e9, 2e9, 1e-6).device_s(profile(torch.randn(1000)))
    assert device_s == pytest.approx(2e-6 + 4e-6 + 2e-6)
    found = candidate("zvc", 4000, 4.0, device_s, 3e-9)
    assert found.cost_s == pytest.approx(device_s + 3e-9 * 1000)
    assert candidate("zvc", 4000, 0.9, device_s, 3e-9).ratio == 1.0  # tiles that grow stay raw


class Arriving:
    """A late profile that arrives when it is asked for the second time."""

    def __init__(self, x):
        self._x, self._asked = x, 0

    def get(self):
        self._asked += 1
        return profile(self._x) if self._asked > 1 else None


@pytest.fixture
def far(monkeypatch):
    monkeypatch.setattr(module, "_is_far", lambda _: True)
    monkeypatch.setattr(module, "LateProfile", Arriving)


def test_until_a_sample_has_arrived_the_choice_is_cheap_and_nobody_waits(far):
    advisor = Advisor(SwapConfig(), None)

    def choose(x):
        codec = advisor.choose(x, Site(), x.dtype.itemsize, tolerance=EXACT, may_keep=True).codec
        return KEEP if codec is None else codec.name

    dense = torch.randn(N)
    assert [choose(dense) for _ in range(3)] == ["raw", KEEP, KEEP]
    indices = torch.randint(0, 1000, (N,))
    assert [choose(indices) for _ in range(2)] == ["raw", "bitpack"]
    (first, _) = advisor.explain()
    assert first.profile is not None


def test_a_named_codec_waits_for_no_sample(far):
    advisor = Advisor(SwapConfig(codec="rle"), None)
    x = torch.randn(N)
    codec = advisor.choose(x, Site(), 0, tolerance=EXACT, may_keep=True).codec
    assert codec is not None
    assert codec.name == "rle"


def test_after_a_look_a_new_sample_is_taken_and_the_old_choice_serves_meanwhile(far):
    advisor = Advisor(SwapConfig(), None)

    def choose(x):
        codec = advisor.choose(x, Site(), 0, tolerance=EXACT, may_keep=True).codec
        return KEEP if codec is None else codec.name

    for _ in range(2):
        choose(relu(0.6))
    assert choose(torch.randn(N)).startswith("zvc")
    advisor.begin_step(0.0, look=1)
    chosen = [choose(torch.randn(N)) for _ in range(2)]
    assert chosen[0].startswith("zvc")
    assert chosen[1] == KEEP


def test_a_codec_that_the_guard_forbids_is_not_used_while_a_sample_is_awaited(far):
    advisor, site = Advisor(SwapConfig(lossy="int8"), None), Site(kind="Linear")

    def choose():
        return advisor.choose(torch.randn(N), site, 0, tolerance=COARSE, may_keep=True).codec

    assert [codec.name for codec in (choose(), choose()) if codec is not None] == ["raw", "int8"]
    advisor.milder.forbid("Linear", "int8")
    assert [codec.name for codec in (choose(), choose()) if codec is not None] == ["raw", "bf16"]
