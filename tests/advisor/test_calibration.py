"""Calibration: fits, files, measurement."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cswap import cli
from cswap.advisor import calibrate, calibration, link
from cswap.advisor import round_trip as trial
from cswap.advisor.advisor import Advisor
from cswap.advisor.calibration import Calibration, CodecTimes, machine_of, path_of, stored
from cswap.advisor.call_site import Site
from cswap.advisor.candidates import all_candidates
from cswap.advisor.fit import TimeModel, fit
from cswap.advisor.live_costs import KEEP
from cswap.codecs.tolerance import EXACT
from cswap.config import SwapConfig
from cswap.errors import UnsupportedError
from cswap.schema.tensor import TensorProfile


def grid():
    return [
        TensorProfile("float32", nbytes, 1, zeros)
        for nbytes in (1 << 18, 1 << 20, 1 << 22, 1 << 24)
        for zeros in (0.0, 0.5, 0.9)
    ]


def seconds_of(profiles, overhead, per_byte, per_nonzero):
    return [
        overhead + p.nbytes * (per_byte + per_nonzero * (1 - p.zero_fraction)) for p in profiles
    ]


def test_a_fit_finds_the_terms_again():
    profiles = grid()
    model = fit(profiles, seconds_of(profiles, 2e-5, 1e-10, 3e-10))
    assert model.overhead_s == pytest.approx(2e-5, rel=1e-6)
    assert model.s_per_byte == pytest.approx(1e-10, rel=1e-6)
    assert model.s_per_nonzero_byte == pytest.approx(3e-10, rel=1e-6)
    assert model.residual < 1e-9
    p = TensorProfile("float32", 1 << 21, 1, 0.25)
    assert model.seconds(p) == pytest.approx(seconds_of([p], 2e-5, 1e-10, 3e-10)[0])


def test_a_disturbed_measurement_moves_it_little():
    profiles, rng = grid(), np.random.default_rng(0)
    seconds = np.array(seconds_of(profiles, 2e-5, 1e-10, 3e-10)) * rng.normal(1, 0.01, 12)
    seconds[5] *= 8
    model = fit(profiles, seconds.tolist())
    for p in profiles:
        assert model.seconds(p) == pytest.approx(seconds_of([p], 2e-5, 1e-10, 3e-10)[0], rel=0.05)


def test_no_term_is_negative():
    profiles = grid()
    model = fit(profiles, seconds_of(profiles, 2e-5, 4e-10, -3e-10))
    assert min(model.overhead_s, model.s_per_byte, model.s_per_nonzero_byte) >= 0


@pytest.mark.parametrize("seconds", [[1.0, 1.0], [1.0, 0.0, 1.0]])
def test_too_little_to_fit(seconds):
    with pytest.raises(ValueError, match="at least three"):
        fit(grid()[: len(seconds)], seconds)


# ----------------------------------------------------------------- the file


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path))
    calibration._read.cache_clear()
    yield tmp_path
    calibration._read.cache_clear()


def times(s_per_byte):
    model = TimeModel(1e-5, s_per_byte, 0.0, 0.01)
    return CodecTimes(model, model)


def test_what_is_saved_is_found_again(own_cache):
    made = Calibration(machine_of("cpu"), {"zvc": times(1e-10)})
    assert stored("cpu") is None
    path = made.save()
    assert path.parent == own_cache / "calibration"
    assert stored("cpu") == made


def test_nothing_is_kept_in_a_folder_that_others_may_write(own_cache):
    folder = own_cache / "calibration"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=r"calibration may be written by others \(mode 777\)"):
        Calibration(machine_of("cpu"), {"zvc": times(1e-10)}).save()
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "{",
        lambda text: text.replace('"version": 3', '"version": 99'),
        lambda text: text.replace('"kind": "cpu"', '"kind": "other"'),
        lambda text: text.replace("1e-10", "-1"),
        lambda text: text.replace("1e-10", "NaN"),
        lambda text: text.replace('"s_per_byte"', '"what"'),
        lambda _: "[]",
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_notice(damage, caplog):
    made = Calibration(machine_of("cpu"), {"zvc": times(1e-10)})
    path = made.save()
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING, "cswap"):
        assert stored("cpu") is None
    assert "cswap calibrate" in caplog.text


def test_another_version_is_another_file(monkeypatch):
    here = path_of(machine_of("cpu"))
    monkeypatch.setattr("cswap.__version__", "999")
    assert path_of(machine_of("cpu")) != here


def test_the_advisor_decides_by_what_was_measured():
    x = torch.relu(torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)))

    def choice():
        advisor = Advisor(SwapConfig(), None)
        codec = advisor.choose(x, Site(), 0, tolerance=EXACT, may_keep=True).codec
        return KEEP if codec is None else codec.name

    assert choice().startswith("zvc")
    slow = {name: times(1.0) for name in all_candidates()}
    Calibration(machine_of("cpu"), slow).save()
    assert choice() == KEEP


# -------------------------------------------------------------- measurement


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(calibrate.SIZES, "cpu", (1 << 16, 1 << 18))
    monkeypatch.setattr(calibrate, "all_candidates", lambda: ("raw", "zvc", "bitpack"))
    monkeypatch.setattr(calibrate, "ROUNDS", 2)
    monkeypatch.setattr(link, "ROUNDS", 3)


def test_the_command_measures_shows_and_keeps(quick):
    run = CliRunner().invoke
    assert run(cli.app, ["calibrate", "--show"]).exit_code == 1
    measured = run(cli.app, ["calibrate", "--json"])
    assert measured.exit_code == 0, measured.output
    found = json.loads(measured.output)
    assert set(found["times"]) == {"raw", "zvc", "bitpack"}
    for both in found["times"].values():
        for model in (both["encode"], both["decode"]):
            assert 0 < model["overhead_s"] + model["s_per_byte"] + model["s_per_nonzero_byte"] < 1
    shown = run(cli.app, ["calibrate", "--show"])
    assert shown.exit_code == 0
    assert "bitpack" in shown.output
    kept = stored("cpu")
    assert kept is not None
    assert kept.machine == found["machine"]


@pytest.mark.parametrize("absurd", [0.0, math.nan, pytest.param(-1.0, marks=pytest.mark.slow)])
def test_a_codec_whose_times_cannot_be_is_left_out_with_a_notice(
    quick, absurd, monkeypatch, caplog
):
    real = trial.round_trip

    def strange(codec, x, *, repeat=2):
        nbytes, encode_s, decode_s = real(codec, x, repeat=repeat)
        return nbytes, absurd if codec.name == "zvc" else encode_s, decode_s

    monkeypatch.setattr(calibrate, "round_trip", strange)
    with caplog.at_level(logging.WARNING, "cswap"):
        list(calibrate.steps("cpu"))
    assert caplog.text.count("zvc was not calibrated") == 1
    found = stored("cpu")
    assert found is not None
    assert set(found.left_out) == {"zvc"}
    assert set(found.times) == {"raw", "bitpack"}


def test_the_link_of_a_cpu_is_a_copy_of_raw():
    model = TimeModel(1e-5, 1e-10, 0.0, 0.01)
    found = link.link_of_cpu(CodecTimes(model, TimeModel(3e-5, 5e-10, 0.0, 0.01)))
    assert found.d2h_bytes_per_s == pytest.approx(1e10)
    assert found.h2d_bytes_per_s == pytest.approx(2e9)
    assert found.latency_s == pytest.approx(2e-5)
    assert found.duplex_factor == 1.0


def test_a_device_that_cannot_be_measured_is_named():
    with pytest.raises(UnsupportedError, match="device='tpu'"):
        calibrate.measure("zvc", "tpu")


def test_the_machine_is_described():
    machine = calibration.machine_of("cpu")
    assert torch.__version__.startswith(machine["torch"].split("+")[0])
    assert machine["cpu"]
