"""The least time within a peak, on steps whose optimum is known by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.twin.optimum import curve
from bench.twin.profiles import H200

GIB = 1 << 30
FREE = replace(H200, out=1e20, back=1e20, both=1e20)
NO_LINK = replace(H200, out=1e3, back=1e3, both=1e3)
SLOW = replace(H200, out=GIB / 4, back=GIB / 4, both=GIB / 4)


def _op(seconds: float, phase: str, live: float, reads: list[int], writes: list[int]) -> Any:
    return {
        "name": "mul",
        "kind": "elementwise",
        "seconds": seconds,
        "phase": phase,
        "reads": reads,
        "writes": writes,
        "live_bytes": round(live * GIB),
    }


def _saved(gib: float, born: int, read: int, used: int) -> dict[str, Any]:
    return {
        "nbytes": round(gib * GIB),
        "dtype": "float32",
        "born": born,
        "freed": used + 1,
        "written": [born],
        "read": read,
        "saved": born + 1,
        "used": used,
        "codec": "zvc",
        "ratio": 1.0,
    }


def _chain(n: int, resident: float) -> dict[str, Any]:
    """Forward of n operators of a second, each of which reads the 1 GiB of the one before."""
    forward = [_op(1.0, "forward", resident + i + 1, [i - 1] if i else [], [i]) for i in range(n)]
    backward = [_op(2.0, "backward", resident + n - j, [n - 1 - j], []) for j in range(n)]
    storages = [_saved(1, i, min(i + 1, n - 1), 2 * n - 1 - i) for i in range(n)]
    return {"ops": forward + backward, "storages": storages}


def _pair(*, beside: float = 0.0) -> dict[str, Any]:
    """x takes 10 s and y, of x, 3 s; then 4 GiB are beside them, and so many in backward."""
    ops = [
        _op(10.0, "forward", 1, [], [0]),
        _op(3.0, "forward", 2, [0], [1]),
        _op(1.0, "forward", 2, [1], []),
        _op(1.0, "forward", 6, [], [2]),
        _op(1.0, "backward", 2 + beside, [1], []),
        _op(1.0, "backward", 1, [0], []),
    ]
    large = {"nbytes": 4 * GIB, "dtype": "float32", "born": 3, "freed": 4, "written": [3]}
    return {"ops": ops, "storages": [_saved(1, 0, 1, 5), _saved(1, 1, 2, 4), {**large, "read": 3}]}


def _times(recording: dict[str, Any], profile: Any, *shares: float) -> list[float | None]:
    return [point.step_s for point in curve(recording, profile, shares)]


def test_a_free_link_takes_no_time_at_every_peak_that_raw_swaps_reach():
    points = curve(_chain(20, 3.0), FREE, (1.0, 0.5, 0.25, 0.1))
    assert [point.peak_bytes / GIB for point in points] == pytest.approx([23, 13, 8, 5])
    assert [point.step_s for point in points] == pytest.approx([60.0] * 4)


def test_a_peak_below_what_operators_use_at_once_is_out_of_reach():
    assert _times(_chain(20, 3.0), FREE, 0.1, 0.099) == [pytest.approx(60.0), None]


def test_computing_again_costs_the_cheapest_operators():
    times = _times(_pair(), NO_LINK, 1.0, 0.75, 0.5, 0.25, 0.0)
    assert times == pytest.approx([17.0, 18.5, 20.0, 25.0, 30.0], abs=1e-3)
    assert _times(_pair(), NO_LINK, -0.01) == [None]


def test_an_ancestor_has_to_be_there_when_a_tensor_is_computed_again():
    # Within 4.25 GiB, 0.25 of both are left beside the 4 GiB. Where y comes back there is room for
    # 0.75 of x beside it, so 0.75 of y are computed again, not all, and all of x, not 0.75.
    times = _times(_pair(beside=2.5), NO_LINK, 0.125)
    assert times == pytest.approx([17.0 + 0.75 * 3.0 + 10.0], abs=1e-3)


def test_in_place_operators_and_unsaved_ones_run_again():
    recording = _pair()
    recording["ops"][2] = _op(5.0, "forward", 2, [1], [1])
    recording["storages"][1] = {**_saved(1, 1, 2, 4), "written": [1, 2]}
    assert _times(recording, NO_LINK, 0.5) == pytest.approx([21.0 + 8.0], abs=1e-3)
    del recording["storages"][0]["saved"], recording["storages"][0]["used"]
    assert _times(recording, NO_LINK, 0.0) == pytest.approx([21.0 + 18.0], abs=1e-3)


def test_a_slow_link_stalls_for_what_does_not_fit_beside_the_operators():
    # 1 GiB takes 4 s each way. Beside operators there are 5 s to leave, and 2 s to come back. While
    # a share is computed again the link goes on: 4 (1 - share) = 2 + 1000 share.
    recording = _pair()
    recording["ops"][0]["seconds"] = 1000.0
    recording["storages"][1]["written"] = [0, 1]  # y is as dear to compute again
    assert _times(recording, SLOW, 0.5) == pytest.approx([1007.0 + 2000 / 1004], abs=1e-5)


def test_what_is_encoded_moves_sooner_and_takes_the_codecs_time():
    recording = _pair()
    recording["ops"][0]["seconds"] = 1000.0
    recording["storages"][1]["written"] = [0, 1]
    for s in recording["storages"][:2]:
        s["ratio"] = 2.0
    encode, decode = SLOW.codec_rates("zvc")
    codec_s = GIB / encode + GIB / decode
    assert _times(recording, SLOW, 0.5) == pytest.approx([1007.0 + codec_s], abs=1e-6)


@pytest.mark.slow
def test_two_recordings_of_a_step_are_equal():
    root = Path(__file__).resolve().parents[2]
    argument = json.dumps({"model": "gpt2-small-b4", "profile": H200.name})
    paths = os.pathsep.join(map(str, (root, root / "kernels")))
    environment = {**os.environ, "PYTHONPATH": paths, "CSWAP_CALIBRATE": "0"}
    one, other = (
        subprocess.run(
            [sys.executable, "-m", "bench.twin.recording", argument],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "01"
    )
    assert one == other
    found = json.loads(one)
    saved = [s for s in found["storages"] if "codec" in s]
    assert all(s["born"] <= s["saved"] <= s["used"] < s["freed"] for s in saved)
    seconds = sum(op["seconds"] for op in found["ops"])
    plain, half = curve(found, H200, (1.0, 0.5))
    assert plain.step_s == pytest.approx(seconds)
    assert half.peak_bytes < plain.peak_bytes == max(op["live_bytes"] for op in found["ops"])
    assert half.step_s is not None
    assert seconds < half.step_s < 1.3 * seconds
