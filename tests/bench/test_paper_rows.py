"""The rows of `python -m bench papers`: networks, the time model, means and maxima."""

from __future__ import annotations

import pytest
import torch

from bench.papers import cswap_means, home_means, time_model
from bench.papers.inception import inception3
from bench.papers.report import HEADINGS, summary
from bench.papers.row import Row
from cswap.advisor.cswap_plus import TimeModels

# --------------------------------------------------------------- the networks


def test_inception_3_has_the_published_number_of_parameters():
    # torchvision's 27161264 less the 3326696 of the auxiliary classifier
    with torch.device("meta"):
        network = inception3()
    assert sum(p.numel() for p in network.parameters()) == 27_161_264 - 3_326_696


@pytest.mark.parametrize(("side", "last"), [(299, 8), (32, 6)])
def test_inception_3_takes_large_and_small_images(side, last):
    with torch.device("meta"):
        maps = inception3(10, side).features[:-1](torch.empty(2, 3, side, side))
    assert maps.shape == (2, 2048, last, last)


# ------------------------------------------------------------- the time model


def model_of(per_byte):
    return TimeModels(0.2, 0.8, ((0.0, per_byte, 0.0),))


def samples_of(per_byte, off=0.0):
    return [
        (float(mib << 20), 0.2 + 0.1 * i, (per_byte + off * (-1) ** i) * (mib << 20))
        for mib in (1, 4, 16)
        for i in range(6)
    ]


def test_the_error_is_that_of_measurements_that_were_held_out():
    exact = samples_of(1e-9)
    assert time_model.error_percent(model_of(1e-9), exact) == pytest.approx(0.0, abs=1e-9)
    assert time_model.error_percent(model_of(2e-9), exact) > 50
    fitted, held_out = time_model.split(exact)
    assert not set(fitted) & set(held_out)
    assert len(held_out) == len(exact) / time_model.HELD_OUT


def test_decisions_are_right_with_the_measured_times_and_not_always_with_others():
    models = [model_of(1e-9), model_of(1e-9)]
    pairs = list(zip(samples_of(1e-9), samples_of(1e-9), strict=True))
    assert time_model.decision_percent(models, pairs) == 100
    off = list(zip(samples_of(1e-9, off=0.9e-9), samples_of(1e-9, off=0.9e-9), strict=True))
    assert 40 < time_model.decision_percent(models, off) < 100


def test_times_are_measured_for_every_size_and_share():
    encodes, decodes = time_model.measured((1,), (0.2, 0.5, 0.8))
    for samples in (encodes, decodes):
        assert [(nbytes, zeros) for nbytes, zeros, _ in samples] == [
            (float(1 << 20), zeros) for zeros in (0.2, 0.5, 0.8)
        ]
        assert all(seconds > 0 for *_, seconds in samples)


# ------------------------------------------------------------- means and maxima


def gain(model, published_gain, ours, cut, over_sc=1.1, at_profile_rate=1.0):
    details = {
        "kind": "gain",
        "dataset": "cifar10",
        "gpu": "v100",
        "activation": "relu",
        "model": model,
        "swap_latency_cut": cut,
        "over_sc": over_sc,
        "at_profile_rate": at_profile_rate,
    }
    return Row("CSwap+", model, "x", published_gain, ours, "p", "w", details=details).to_dict()


def test_a_published_mean_stands_beside_our_mean_and_up_to_beside_our_maximum():
    rows = [gain("a", 1.5, 1.1, 0.2), gain("b", 1.25, 1.2, 0.3), gain("c", 1.2, 1.6, 0.4)]
    found = {row["details"]["quantity"]: row for row in cswap_means.means(rows)}
    mean, most = found["gain_mean"], found["gain_maximum"]
    assert (mean["published"], mean["ours"]) == (25.0, pytest.approx(30.0))
    assert (mean["published_is"], mean["ours_is"]) == ("mean", "mean, simulated")
    assert (most["published"], most["ours"]) == (pytest.approx(50.0), pytest.approx(60.0))
    cut = found["cut_maximum"]
    assert (cut["published"], cut["ours"]) == (50.9, pytest.approx(40.0))
    assert (cut["published_is"], cut["ours_is"]) == ("up to", "maximum, simulated")
    assert found["cut_mean"]["ours"] == pytest.approx(30.0)
    assert found["rank"]["ours"] == pytest.approx(-1.0)
    assert found["gain_at_profile_rate"]["ours"] == pytest.approx(0.0)
    # Everything hangs on the fitted rate, except the row that goes without it.
    assert found["gain_at_profile_rate"]["fitted"] == ""
    assert {r["fitted"] for r in found.values()} == {"", "codec rate"}


def test_homes_maxima_stand_beside_what_it_says_up_to():
    def row(kind, ours):
        return Row("HOME", "m", "x", None, ours, "p", "w", details={"kind": kind}).to_dict()

    kinds = ("over none", "over capuchin", "speed over vdnn-all", "speed over capuchin")
    rows = [row(kind, ours) for kind in kinds for ours in (1.0, 3.0)]
    found = {r["what"]: r for r in home_means.means(rows)}
    assert [(r["published"], r["published_is"], r["ours"]) for r in found.values()] == [
        (2.2, "mean", 2.0),
        (2.8, "up to", 3.0),
        (1.12, "mean", 2.0),
        (1.3, "up to", 3.0),
        (5.7, "up to", 3.0),
        (1.3, "up to", 3.0),
    ]
    assert home_means.means([]) == []


def test_the_table_says_for_each_row_how_it_was_published_and_what_was_fitted():
    network = gain("a", 1.5, 1.1, 0.2)
    decision = Row("CSwap+", "decisions", "%", 93.5, 86.0, "p", "w", ours_is="measured").to_dict()
    first = Row("vDNN", "memory", "GB", 28.0, 32.44, "p", "w", ours_is="computed").to_dict()
    document = {
        "cells": {"x": [decision, network], "y": [first]},
        "means": cswap_means.means([network, gain("b", 1.2, 1.3, 0.1)]),
    }
    lines = summary(document)
    assert {len(line) for line in lines} == {len(HEADINGS)}
    assert lines[0][:7] == ["vDNN", "memory", "28.0 GB", "one figure", "32.4 GB", "computed", "no"]
    assert lines[-1][1:6] == ["decisions", "93.5 %", "one figure", "86.0 %", "measured"]
    assert {line[6] for line in lines} == {"no", "codec rate"}
