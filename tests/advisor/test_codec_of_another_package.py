"""A codec that cswap does not know is priced, composed, admitted and replaced like a built-in one.

The codec is defined here and nowhere else: 12 of the 32 bits of a float32, which are its sign,
exponent and 3 bits of its mantissa. ``short`` is lossless and refuses tiles that need more bits,
``cut`` is lossy and drops the rest.
"""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import torch

import cswap
from cswap.advisor import calibrate
from cswap.advisor import candidates as module
from cswap.advisor.advisor import Advisor
from cswap.advisor.call_site import Site
from cswap.advisor.candidates import (
    all_candidates,
    default_rate,
    lossless_candidates,
    lossy_candidates,
    lossy_names,
)
from cswap.advisor.live_costs import KEEP
from cswap.advisor.lossy_fallback import Milder, harshest, milder_codecs, next_milder
from cswap.advisor.rates import UNKNOWN_RATES
from cswap.codecs import registry
from cswap.codecs.raw import Raw
from cswap.codecs.registry import get_codec
from cswap.codecs.tiled import TiledCodec, TileFunctions
from cswap.codecs.tolerance import COARSE, EXACT
from cswap.codecs.traits import LOSSLESS, CodecRate, CodecTraits
from cswap.config import SwapConfig
from cswap.errors import ConfigError
from cswap.testing import check_codec
from cswap_kernels.jit import njit
from cswap_kernels.tile_calls import tile_decoder, tile_encoder

N = 1 << 18
FAST = {"cpu": CodecRate(20e9, 20e9)}
INFINITE = 0x7F800000


@njit(nogil=True)
def encode_tile(words, dst, args, first):
    """12 bits per word; args[0]: whether dropping the lower 20 is an error."""
    n = words.size
    for i in range(n):
        word = words[i]
        if (word & INFINITE) == INFINITE or (args[0] and word & 0xFFFFF):
            return np.int64(-1)
        code, at = word >> 20, 3 * (i // 2)
        if i % 2 == 0:
            dst[at], dst[at + 1], dst[at + 2] = code & 0xFF, code >> 8, 0
        else:
            dst[at + 1], dst[at + 2] = dst[at + 1] | (code & 0xF) << 4, code >> 4
    return np.int64(3 * ((n + 1) // 2))


@njit(nogil=True)
def decode_tile(src, words, args, first):
    if src.size != 3 * ((words.size + 1) // 2):
        return np.int64(-1)
    for i in range(words.size):
        at = 3 * (i // 2)
        if i % 2 == 0:
            code = src[at] | np.uint32(src[at + 1] & 0xF) << 8
        else:
            code = np.uint32(src[at + 1]) >> 4 | np.uint32(src[at + 2]) << 4
        words[i] = np.uint32(code) << 20
    return np.int64(0)


class Short(TiledCodec):
    """12 bits per float32; a tile that needs more stays raw."""

    name = "short"
    lossless = True
    traits = CodecTraits(predicted_ratio=lambda _: 32 / 12, rates=FAST)

    def supports(self, dtype, device="cpu"):
        return dtype == torch.float32 and device == "cpu"

    def tile_functions(self, dtype):
        return TileFunctions(tile_encoder(encode_tile, 4), tile_decoder(decode_tile, 4))

    def tile_args(self, dtype, key):
        return np.array([self.lossless], np.uint64)


class Cut(Short):
    """12 bits per float32; the others are lost."""

    name = "cut"
    lossless = False
    traits = CodecTraits(predicted_ratio=lambda _: 32 / 12, relative_error=0.054, rates=FAST)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_made", dict(registry._made))
    monkeypatch.setattr(registry, "_warned", set())
    monkeypatch.setattr(module, "_warned", set())
    cswap.register_codec("short", Short)
    cswap.register_codec("cut", Cut)


def normal(zeros=0.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, generator=generator)
    x *= torch.rand(N, generator=generator) >= zeros
    return x.abs().to(dtype).float()


def eighths(zeros=0.0):
    """Values that came out of an FP8 multiplication: 3 bits of mantissa."""
    return normal(zeros, torch.float8_e4m3fn)


def choice(x, *, steps=1, tolerance=EXACT, **options):
    advisor, chosen = Advisor(SwapConfig(**options), None), KEEP
    for _ in range(steps):
        advice = advisor.choose(x, Site(), 0, tolerance=tolerance, may_keep=True)
        if advice.codec is None:
            return KEEP
        chosen = advice.codec.name
        advice.note_encoded(chosen, x.nbytes, advice.codec.encode(x).nbytes)
    return chosen


@pytest.mark.parametrize("name", ["short", "zvc+cut"])
def test_it_keeps_the_contract(name):
    check_codec(get_codec(name), examples=1)


def test_auto_chooses_it_where_it_is_best():
    assert {"short", "zvc+short"} <= set(lossless_candidates())
    assert choice(eighths()) == "short"
    assert choice(eighths(zeros=0.7)) == "zvc+short"
    assert choice(eighths(zeros=0.999)) in ("zvc", "csr", "rle")
    assert choice(torch.rand(N) < 0.5) == "bitpack"  # it takes no bools


def test_a_ratio_that_it_promises_and_misses_is_corrected():
    noise = torch.randn(N, generator=torch.Generator().manual_seed(1))
    assert choice(noise) == "short"
    assert choice(noise, steps=40) == KEEP


def test_it_composes_with_ratio_error_and_rates_of_its_own():
    composed, alone, zvc = get_codec("zvc+cut"), get_codec("cut"), get_codec("zvc")
    assert composed.traits.relative_error == alone.traits.relative_error
    rates = [c.traits.rates["cpu"].encode_bytes_per_s for c in (composed, alone, zvc)]
    assert rates[0] < min(rates[1:])
    x = eighths(zeros=0.7)
    assert torch.equal(composed.decode(composed.encode(x)), x)


def test_a_tolerance_admits_it_by_its_error():
    assert {"cut", "zvc+cut"} <= set(lossy_candidates(0.06))
    assert not {"cut", "zvc+cut"} & set(lossy_candidates(0.05))
    assert choice(normal(), lossy=0.06, tolerance=COARSE) == "int8"  # smaller, and less error


def test_the_option_lossy_takes_its_name(monkeypatch):
    monkeypatch.delitem(registry._registered, "short")  # which promises the same ratio
    assert "cut" in lossy_names()
    assert choice(normal(), lossy="cut", tolerance=COARSE) == "cut"
    assert choice(normal(zeros=0.7), lossy="cut", tolerance=COARSE) == "zvc+cut"
    assert choice(normal(), lossy="cut", tolerance=EXACT) == KEEP


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cud", "must be one of off, .*cut.*Did you mean 'cut'"),
        ("short", "is lossless. Use one of off, .*cut"),
        ("plain", "cannot predict its ratio. Name it with codec='plain'"),
    ],
)
def test_a_lossy_codec_that_cannot_serve_is_refused_with_the_remedy(name, message):
    class Plain(Cut):
        """Says nothing of itself."""

        name = "plain"
        traits = CodecTraits()

    cswap.register_codec("plain", Plain)
    with pytest.raises(ConfigError, match=message):
        Advisor(SwapConfig(lossy=name), None)


def test_its_place_in_the_guards_ladder():
    assert next_milder("int4") == "cut"
    assert next_milder("zvc+int4") == "zvc+cut"
    assert next_milder("cut") == "fp8"
    assert harshest(["fp8", "cut", "bf16"]) == "cut"
    assert harshest(["cut", "int4"]) == "int4"
    milder = Milder()
    assert milder.forbid("Linear", "int4") == "cut"
    assert milder.instead("zvc+int4", torch.zeros(8), "Linear") == "zvc+cut"
    assert milder.among(("int4", "zvc+int4"), torch.zeros(8), "Linear") == ("cut", "zvc+cut")
    assert milder.instead("int4", torch.zeros(8).bfloat16(), "Linear") == "fp8"


def named(name, milder):
    """A lossy codec that names its successor."""

    class Named(Raw):
        lossless = False
        traits = CodecTraits(milder=milder)

    Named.name = name
    return Named


def test_a_codec_may_name_its_successor():
    cswap.register_codec("a", named("a", "int8"))
    cswap.register_codec("b", named("b", LOSSLESS))
    assert list(milder_codecs("a")) == ["int8", "bf16"]
    assert list(milder_codecs("b")) == []


def test_successors_that_name_each_other_or_do_not_exist_end_the_ladder():
    cswap.register_codec("a", named("a", "b"))
    cswap.register_codec("b", named("b", "a"))
    cswap.register_codec("c", named("c", "nothing"))
    assert list(milder_codecs("a")) == ["b"]
    assert Milder().forbid("Linear", "c") == LOSSLESS


def test_the_guard_goes_to_it_and_from_it():
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    rows = torch.randn(128, 64, generator=torch.Generator().manual_seed(2))
    config = cswap.SwapConfig(codec="int4", min_bytes=0, guard_every=1, guard_error=1e-9)
    with cswap.install(net, config=config) as handle:
        for _ in range(30):
            net(rows).square().mean().backward()
    assert {"Linear: int4 -> cut", "Linear: cut -> fp8"} <= set(handle.stats.guard_fallbacks)


def test_the_engine_uses_it():
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    with cswap.install(net, min_bytes=0) as handle:
        for _ in range(3):
            net(eighths().view(-1, 256)).sum().backward()
    assert handle.stats.by_codec["short"].encoded > 0


# ------------------------------------------------------------ without rates, or with nonsense


def test_a_codec_without_rates_counts_as_slow_until_it_is_calibrated(monkeypatch):
    class Unrated(Short):
        """Declares its ratio only."""

        name = "unrated"
        traits = CodecTraits(predicted_ratio=lambda _: 32 / 12)

    monkeypatch.delitem(registry._registered, "short")
    cswap.register_codec("unrated", Unrated)
    assert default_rate(get_codec("unrated"), "cpu") == UNKNOWN_RATES["cpu"]
    # It counts as slow, but is the only one that shrinks them so far.
    assert choice(eighths().repeat(4)) == "unrated"
    assert "unrated" in all_candidates()
    times = calibrate.measure("unrated", "cpu")
    assert times.encode.s_per_byte < 1 / UNKNOWN_RATES["cpu"].encode_bytes_per_s


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -2.0, "much", None])
def test_a_prediction_that_is_no_ratio_is_warned_of_once_and_the_codec_left_out(bad, caplog):
    class Wrong(Short):
        """Predicts nonsense."""

        name = "wrong"
        traits = CodecTraits(predicted_ratio=lambda _: bad, rates=FAST)

    cswap.register_codec("wrong", Wrong)
    with caplog.at_level(logging.WARNING, "cswap"):
        advisor = Advisor(SwapConfig(), None)
        for position in range(3):
            advisor.choose(normal(), Site(), position, tolerance=EXACT, may_keep=True)
    assert caplog.text.count("codec 'wrong' predicts no usable ratio") == 1
    assert "wrong" not in {c.codec for e in advisor.explain() for c in e.candidates}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"predicted_ratio": 2.0}, "predicted_ratio=2.0: must be a function"),
        ({"relative_error": 0.0}, "relative_error=0.0: must be a number above 0"),
        ({"relative_error": True}, "relative_error=True"),
        ({"rates": {"cpu": 1e9}}, "must map kinds of device to CodecRate"),
        ({"rates_after_zvc": {"cpu": 1e9}}, "rates_after_zvc="),
    ],
)
def test_traits_that_cannot_be_are_refused_where_they_are_made(wrong, message):
    with pytest.raises(ConfigError, match=message):
        CodecTraits(**wrong)


@pytest.mark.parametrize("wrong", [(0.0, 1e9), (1e9, -1.0), (float("nan"), 1e9), (1e9, 1e9, -1.0)])
def test_rates_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"CodecRate.*must be"):
        CodecRate(*wrong)


def test_a_codec_whose_traits_are_something_else_is_refused():
    class Wrong(Short):
        """Has a number for traits."""

        name = "wrong"
        traits = 0.1  # type: ignore[assignment]

    cswap.register_codec("wrong", Wrong)
    with pytest.raises(ConfigError, match=r"traits=.*must be CodecTraits"):
        get_codec("wrong")


# ------------------------------------------------------------------ entry points

PLUGIN = """
import torch
from cswap import Codec, CorruptEncodingError
from cswap.codecs.traits import CodecRate, CodecTraits

class Nothing(Codec):
    '''All zeros, as no bytes; anything else raw.'''

    name = "nothing"
    lossless = True
    max_ratio = 1 << 16
    traits = CodecTraits(
        predicted_ratio=lambda p: 65536.0 if p.zero_fraction == 1 else 1.0,
        rates={"cpu": CodecRate(30e9, 30e9)},
    )

    def supports(self, dtype, device="cpu"):
        return dtype == torch.float32 and device == "cpu"

    def bound(self, dtype, numel):
        return numel * dtype.itemsize

    def encode_flat(self, x, out, *, key, stream):
        if not x.view(torch.int32).any():
            return 0
        out[: x.nbytes] = x.view(torch.uint8)
        return x.nbytes

    def decode_flat(self, payload, out, *, stream):
        if payload.numel() not in (0, out.nbytes):
            raise CorruptEncodingError("nothing: not so many bytes")
        out.zero_() if payload.numel() == 0 else out.view(torch.uint8).copy_(payload)
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """An installed distribution with a codec that works and one whose module is missing."""
    info = tmp_path / "other_codecs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-codecs\nVersion: 1.0\n")
    points = "[cswap.codecs]\nnothing = nothing_codec:Nothing\nbroken = no_such_module:Broken\n"
    (info / "entry_points.txt").write_text(points)
    (tmp_path / "nothing_codec.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()
    sys.modules.pop("nothing_codec", None)


@pytest.mark.usefixtures("distribution")
def test_auto_chooses_a_codec_of_an_entry_point_and_warns_of_a_broken_one(caplog):
    with caplog.at_level(logging.WARNING, "cswap"):
        assert choice(torch.zeros(N)) == "nothing"
        assert choice(normal(zeros=0.7)) != "nothing"
    assert caplog.text.count("codec 'broken' cannot be made and is not considered") == 1
    assert "zvc+nothing" not in all_candidates()  # it does not encode by tiles
