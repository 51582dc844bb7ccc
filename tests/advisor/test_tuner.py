"""The launch-shape tuner: finds optima, keeps them, and never takes what is slower."""

from __future__ import annotations

import logging
import random
import statistics

import pytest
import torch

from cswap.advisor import calibration, tuner
from cswap.advisor.calibration import stored
from cswap.codecs import parallel
from cswap.codecs.registry import get_codec
from cswap.errors import ConfigError, UnsupportedError

pytest.importorskip("optuna")

SPACE = {"threads": (64, 128, 256, 512, 1024), "blocks_per_sm": tuple(range(1, 33))}
DEFAULT = {"threads": 256, "blocks_per_sm": 4}


def surface(shape):
    """A valley around 128 threads and 11 blocks per multiprocessor."""
    blocks = abs(shape["blocks_per_sm"] - 11) / 32
    threads = abs(SPACE["threads"].index(shape["threads"]) - 1)
    return 1.0 + blocks + 0.3 * threads + 0.5 * blocks * threads


def drawn(seed):
    generator = random.Random(seed)
    return {name: generator.choice(values) for name, values in SPACE.items()}


def test_a_guided_search_does_better_than_a_random_one():
    guided = [tuner.search(surface, SPACE, DEFAULT, 35, seed)[1] for seed in range(5)]
    at_random = [min(surface(drawn(35 * run + n)) for n in range(35)) for run in range(5)]
    assert statistics.median(guided) < statistics.median(at_random)
    assert statistics.median(guided) < 1.1
    assert max(guided) <= surface(DEFAULT)


def test_the_default_is_measured_first_and_the_budget_kept():
    seen: list[dict[str, int]] = []

    def measure(shape):
        seen.append(dict(shape))  # whichever list that is now
        return surface(shape)

    counts: list[int] = []
    best, seconds = tuner.search(measure, SPACE, DEFAULT, 12, 3, counts.append)
    assert seen[0] == DEFAULT
    assert counts == list(range(1, 13))
    assert seconds == min(map(surface, seen)) == surface(best)
    first, seen = seen, []
    tuner.search(measure, SPACE, DEFAULT, 12, 3)
    assert seen == first  # the same seed, the same samples


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parallel, "SHAPES", {})
    calibration._read.cache_clear()
    monkeypatch.setitem(tuner.NBYTES, "cpu", 1 << 16)
    return tmp_path


def as_if(monkeypatch, seconds):
    monkeypatch.setattr(tuner, "_measurer", lambda _codec, _kind: seconds)


def test_what_is_found_is_kept_and_used(own_cache, monkeypatch):
    as_if(monkeypatch, lambda shape: 1.0 + abs(shape["ranges"] - 3) + shape["least"] / 1e4)
    result = tuner.tune("zvc", "cpu")
    assert result.shape["ranges"] == 3
    assert result.seconds < result.default_s
    calibrated = stored("cpu")
    assert calibrated is not None
    assert (calibrated.times, calibrated.shapes) == ({}, {"zvc": result.shape})
    tuner.apply_tuned("cpu")
    x = torch.randn(1 << 20).relu()
    expected = get_codec("zvc").encode(x).payload
    assert parallel.SHAPES["zvc-encode"].ranges == 3
    parallel.SHAPES.clear()
    assert torch.equal(get_codec("zvc").encode(x).payload, expected)  # the bytes are the same


def test_what_is_hardly_faster_is_not_taken(own_cache, monkeypatch):
    default = tuner.default_of("cpu")
    as_if(monkeypatch, lambda shape: 1.0 if shape == default else 0.99)
    result = tuner.tune("zvc", "cpu", budget=12)
    assert result.shape == default
    assert result.guided_s == 0.99


def test_real_codecs_are_measured(own_cache):
    result = tuner.tune("bitpack", "cpu", budget=3)
    assert 0 < result.seconds <= result.default_s
    assert parallel.SHAPES == {}  # measuring leaves nothing behind


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "{",
        lambda _: "[]",
        lambda text: text.replace('"version": 3', '"version": 9'),
        lambda text: text.replace('"kind": "cpu"', '"kind": "other"'),
        lambda text: text.replace('"ranges": 3', '"ranges": 99'),
        lambda text: text.replace('"ranges"', '"what"'),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_notice(damage, own_cache, monkeypatch, caplog):
    as_if(monkeypatch, lambda shape: 1.0 + abs(shape["ranges"] - 3))
    tuner.tune("zvc", "cpu", budget=20)
    (path,) = (own_cache / "calibration").glob("cpu-*.json")
    path.write_text(damage(path.read_text()))
    calibration._read.cache_clear()
    with caplog.at_level(logging.WARNING, "cswap"):
        assert stored("cpu") is None
    assert "ignored" in caplog.text


def test_what_cannot_be_tuned_is_refused(own_cache):
    with pytest.raises(ConfigError, match="no launch shape"):
        tuner.tune("raw", "cpu")
    with pytest.raises(UnsupportedError, match="tpu"):
        tuner.tune("zvc", "tpu")


def test_the_command_prints_default_random_and_guided(own_cache):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from cswap import cli

    result = CliRunner().invoke(cli.app, ["tune", "zvc", "--samples", "3"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "guided ms" in result.output
    assert "least" in result.output
