"""By malloc's own count, a step with cswap never holds more than one without: programs apart."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

NOISE = 1.03
SMALL_MIB = 1.0
"""Python's objects, and machine code."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is glibc's")

ZVC = '{"codec": "zvc", "guard_every": 0}'
SLOW = '{"slowdown": 3.0}'


@pytest.fixture(scope="module")
def heap(forked):
    program = Path(__file__).with_name("heap_of_a_step.py")

    @cache
    def measured(model, options):
        done = forked.run(program.read_text("utf-8"), model, options, timeout=250)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return measured


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("Rectified", ZVC),  # the next test has the same programs
        ("Recurrent", "{}"),  # trials bring back tensors with gaps
        *(
            pytest.param(model, options, marks=pytest.mark.slow)
            for model in ("Rectified", "Recurrent", "Recommender")
            for options in ("{}", ZVC)
            if (model, options) not in (("Rectified", ZVC), ("Recurrent", "{}"))
        ),
    ],
)
def test_between_forward_and_backward_no_more_is_held_than_without(model, options, heap):
    plain, found = heap(model, "null"), heap(model, options)
    assert max(found["between"]) <= NOISE * max(plain["between"]) + SMALL_MIB
    if options != "{}":
        assert found["swapped"] > 0


def test_an_activation_of_rectified_numbers_takes_half_of_its_bytes(heap):
    plain, found = heap("Rectified", "null"), heap("Rectified", ZVC)
    assert max(found["between"]) < 0.65 * max(plain["between"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Points", "Graph"])
def test_the_peak_of_a_backward_is_no_higher_than_without(model, heap):
    plain, found = heap(model, "null"), heap(model, SLOW)
    # The first step tries chains of operators and codecs; the next ones encode all they can.
    assert max(found["peak"][1:]) <= NOISE * max(plain["peak"])
    assert max(found["between"][1:]) < 0.75 * max(plain["between"])


def test_copies_of_weights_in_a_lower_precision_are_not_held(heap):
    plain, found = heap("Mixed", "null"), heap("Mixed", ZVC)
    assert min(plain["between"]) > 5.5  # MiB of three layers: the first needs none
    assert max(found["between"][1:]) < SMALL_MIB  # in the first, nobody knows who writes weights
