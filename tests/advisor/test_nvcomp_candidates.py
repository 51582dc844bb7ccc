"""nvCOMP's codecs among the candidates of ``codec="auto"``, and what is measured of them."""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import replace

import pytest
import torch

from cswap.advisor import advisor as module
from cswap.advisor import calibrate, candidates, link
from cswap.advisor.advisor import Advisor
from cswap.advisor.calibration import CodecTimes, machine_of, stored
from cswap.advisor.call_site import Site
from cswap.advisor.fit import TimeModel
from cswap.advisor.live_costs import KEEP, LiveCosts
from cswap.codecs import nvcomp_library
from cswap.codecs.nvcomp import NvcompCodec
from cswap.codecs.nvcomp_traits import TRAITS
from cswap.codecs.registry import get_codec
from cswap.codecs.tiled import TiledCodec
from cswap.codecs.tolerance import EXACT
from cswap.config import SwapConfig
from cswap.profiler import profile
from cswap.schema.tensor import TensorProfile
from tests.codecs.nvcomp_stand_in import forgotten, installed

LARGE = 256 << 20
PCIE_4, SLOW = 25e9, 4e9
"""Rates of a link, in bytes per second."""


class OnGpu:
    """What the advisor asks of a tensor on a GPU; of ``nbytes``, with values like these."""

    device, is_cuda = types.SimpleNamespace(type="cuda"), True

    def __init__(self, values, nbytes=LARGE):
        self.values, self.dtype, self.nbytes = values, values.dtype, nbytes

    def numel(self):
        return self.nbytes // self.values.itemsize

    def is_floating_point(self):
        return self.values.is_floating_point()


class Arrived:
    """A `LateProfile` that has arrived."""

    def __init__(self, x):
        self._found = replace(profile(x.values), nbytes=x.nbytes)

    def get(self):
        return self._found

    wait = get


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Nothing is known of nvCOMP before or after a test; samples of a GPU are there at once."""
    monkeypatch.setattr(module, "LateProfile", Arrived)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")
    with forgotten(monkeypatch):
        yield


@pytest.fixture
def library(monkeypatch):
    return installed(monkeypatch)


@pytest.fixture
def own_kernels(monkeypatch):
    """Our codecs run on the GPU, too."""
    monkeypatch.setattr(TiledCodec, "runs_on", lambda *_: True)


def advised(rate, **options):
    """An advisor of a GPU whose link nothing hides."""
    found = Advisor(SwapConfig(**options), None)
    found._costs_on("cuda").price_s_per_byte = 2 / rate
    return found


def choose(advisor, values, position=0):
    x = OnGpu(values)
    advice = advisor.choose(x, Site(), position, tolerance=EXACT, may_keep=False)
    assert advice.codec is not None
    return advice.codec.name


def normal(dtype=torch.bfloat16):
    return torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(dtype)


def in_runs(dtype):
    """Words in runs of 500."""
    words = torch.randint(1, 120, (200,), generator=torch.Generator().manual_seed(0))
    return words.repeat_interleave(500).to(dtype)


# The choice


@pytest.mark.usefixtures("library", "own_kernels")
@pytest.mark.parametrize(("rate", "codec"), [(PCIE_4, "expk"), (SLOW, "nvcomp-ans")])
def test_dense_halves_take_expk_or_where_bytes_are_dear_ans(rate, codec):
    assert choose(advised(rate), normal()) == codec


@pytest.mark.usefixtures("library")
def test_without_kernels_of_ours_it_is_nvcomps_that_pays():
    assert choose(advised(PCIE_4), normal()) == "nvcomp-ans"
    assert choose(advised(SLOW), in_runs(torch.uint8)) == "nvcomp-cascaded"
    assert choose(advised(400e9), normal()) == "raw"  # a link that is as fast as the codec


def times(s_per_byte):
    model = TimeModel(1e-5, s_per_byte, 0.0, 0.0)
    return CodecTimes(model, model)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("fast", ["nvcomp-lz4", "nvcomp-zstd", "nvcomp-gdeflate"])
def test_measured_times_decide_among_them(fast):
    advisor = advised(SLOW)
    slow = {name: times(1e-9) for name in TRAITS}
    advisor._costs_on("cuda")._times = {**slow, fast: times(1e-12)}
    assert choose(advisor, in_runs(torch.uint8)) == fast


@pytest.mark.usefixtures("library", "own_kernels")
def test_sparse_and_integer_tensors_take_our_kernels():
    advisor = advised(PCIE_4)
    assert choose(advisor, normal().relu()) == "zvc+expk"
    assert choose(advisor, torch.arange(1 << 16) % 1000, 1) == "bitpack"
    assert choose(advisor, in_runs(torch.float32), 2) == "zvc+rle"


@pytest.mark.usefixtures("library", "own_kernels")
def test_a_codec_that_has_failed_is_a_candidate_no_more(caplog):
    advisor = advised(SLOW)
    assert choose(advisor, normal()) == "nvcomp-ans"
    codec = get_codec("nvcomp-ans")
    assert isinstance(codec, NvcompCodec)
    codec._trust.lose(torch.bfloat16, RuntimeError("code=1000"))
    codec._trust.lose(torch.bfloat16, RuntimeError("code=1000"))
    assert [r.getMessage() for r in caplog.records] == [
        "codec 'nvcomp-ans' takes no torch.bfloat16 any more: code=1000"
    ]
    assert choose(advisor, normal(), 1) == "expk"
    assert choose(advisor, normal(torch.float32), 2) == "nvcomp-ans"  # of this, it has not


# Where it is not


@pytest.fixture
def imported(monkeypatch):
    """Which of NVIDIA's modules were imported."""
    names, imports = [], importlib.import_module

    def noted(name, *rest):
        if name.startswith("nvidia"):
            names.append(name)
        return imports(name, *rest)

    monkeypatch.setattr(importlib, "import_module", noted)
    return names


@pytest.mark.usefixtures("own_kernels")
def test_where_it_is_not_installed_nobody_says_a_word(monkeypatch, caplog, imported):
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    told = []
    advisor = Advisor(SwapConfig(), None, lambda *why: told.append(why))
    advisor._costs_on("cuda").price_s_per_byte = 2 / SLOW
    assert choose(advisor, normal()) == "expk"
    assert {c.codec for e in advisor.explain() for c in e.candidates}.isdisjoint(TRAITS)
    assert (told, caplog.records, imported) == ([], [], [])
    assert calibrate.n_steps("cuda") == len(candidates.all_candidates()) + 1


def test_a_model_on_a_cpu_does_not_load_it(monkeypatch, library):
    def looked():
        raise AssertionError("somebody looks for nvCOMP")

    monkeypatch.setattr(nvcomp_library, "is_installed", looked)
    advisor = Advisor(SwapConfig(), None)
    advisor.choose(normal(), Site(), 0, tolerance=EXACT, may_keep=True)
    assert KEEP in {c.codec for e in advisor.explain() for c in e.candidates}
    assert calibrate.n_steps("cpu") == len(candidates.all_candidates()) + 1


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("how", ["version", "refusal", "import"])
def test_an_installed_one_that_does_not_work_is_reported_once(monkeypatch, library, how):
    if how == "version":
        library.__version__ = "5.1.0"
    elif how == "refusal":
        monkeypatch.setattr(library, "Codec", lambda **_: 1 / 0)
    else:
        real = importlib.import_module

        def broken(name, *rest):
            if name == nvcomp_library.MODULE:
                raise RuntimeError("libnvcomp.so: undefined symbol")
            return real(name, *rest)

        monkeypatch.setattr(importlib, "import_module", broken)
    told = []
    advisor = Advisor(SwapConfig(), None, lambda *why: told.append(why))
    advisor._costs_on("cuda").price_s_per_byte = 2 / SLOW
    assert [choose(advisor, normal(), i) for i in range(3)] == ["expk"] * 3
    ((what, why, then),) = told
    assert (what, then) == ("nvcomp", "taking other codecs")
    words = {"version": "5.1.0", "refusal": "division by zero", "import": "undefined symbol"}
    assert words[how] in why
    assert calibrate.n_steps("cuda") == len(candidates.all_candidates()) + 1


# What is measured


@pytest.mark.usefixtures("library", "own_kernels")
def test_a_tensor_that_is_stored_raw_corrects_the_predicted_ratio():
    """nvCOMP's payload has the raw size then, and the codec's name."""
    advisor = advised(SLOW)
    values, chosen = normal(), []
    for _ in range(20):
        advice = advisor.choose(OnGpu(values), Site(), 0, tolerance=EXACT, may_keep=False)
        assert advice.codec is not None
        chosen.append(advice.codec.name)
        ratio = 1.0 if chosen[-1].startswith("nvcomp") else 1.37
        advice.note_encoded(chosen[-1], LARGE, int(LARGE / ratio))
    assert (chosen[0], chosen[-1]) == ("nvcomp-ans", "expk")


@pytest.mark.usefixtures("library")
def test_rates_of_others_say_nothing_about_the_device():
    costs, x = LiveCosts("cuda", None, adapt=True), TensorProfile("bfloat16", LARGE, 64)
    for _ in range(20):
        costs.observe("nvcomp-ans", x, 3 * costs.model_s("nvcomp-ans", x))
    costs.corrections.refit()
    assert costs.corrections.seconds("expk", 1e-3) == pytest.approx(1e-3)
    assert costs.corrections.seconds("nvcomp-ans", 1e-3) == pytest.approx(3e-3, rel=0.05)
    costs._times = {"nvcomp-ans": times(1e-12)}  # of a calibration
    for _ in range(20):
        costs.observe("nvcomp-ans", x, 3 * costs.model_s("nvcomp-ans", x))
    costs.corrections.refit()
    assert costs.corrections.seconds("expk", 1e-3) > 1.01e-3


@pytest.fixture
def on_a_cpu(monkeypatch, library, tmp_path):
    """nvCOMP's codecs take tensors of this CPU, and are those of its calibration."""
    supports = NvcompCodec.supports
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(NvcompCodec, "supports", lambda codec, d, _="": supports(codec, d, "cuda"))
    monkeypatch.setattr(calibrate, "all_candidates", lambda: ("raw",))
    monkeypatch.setattr(calibrate, "nvcomp_candidates", lambda _: ("nvcomp-lz4", "nvcomp-ans"))
    monkeypatch.setitem(calibrate.SIZES, "cpu", (1 << 14, 1 << 15))
    monkeypatch.setattr(calibrate, "ROUNDS", 1)
    monkeypatch.setattr(link, "link_of_cpu", lambda _: None)
    return library


def test_a_calibration_measures_them_and_leaves_out_what_fails(monkeypatch, on_a_cpu):
    ans = get_codec("nvcomp-ans")
    assert isinstance(ans, NvcompCodec)
    ans._trust.failed = {torch.float32: "code=1000", torch.int64: "code=1000"}
    assert list(calibrate.steps("cpu")) == ["raw", "nvcomp-lz4", "nvcomp-ans", "link"]
    found = stored("cpu")
    assert found is not None
    assert (set(found.times), set(found.left_out)) == ({"raw", "nvcomp-lz4"}, {"nvcomp-ans"})
    assert found.times["nvcomp-lz4"].encode.bytes_per_s(0.0) > 0
    assert found.machine == machine_of("cpu")


# CSwap+


@pytest.mark.usefixtures("library")
def test_the_papers_rule_takes_lz4_where_it_shortens_the_swap(monkeypatch):
    advisor = advised(SLOW, policy="cswap+")
    assert choose(advisor, in_runs(torch.float32)) == "nvcomp-lz4"
    assert choose(advisor, normal(torch.float32), 1) == "raw"  # ANS is none of the papers'
    monkeypatch.setattr(TiledCodec, "runs_on", lambda *_: True)
    assert choose(advised(SLOW, policy="cswap+"), in_runs(torch.float32)) == "rle"
