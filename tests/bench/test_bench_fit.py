"""`python -m bench fit`: goals are held by a meter that is not cswap's, with the bits of off."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from bench.__main__ import app
from bench.fit import command, report
from bench.fit.measure import CHECKPOINT, FIT, OFF


def fit(folder, settling, shares):
    """Result file, output and document of the command on a small model."""
    out = folder / "fit.json"
    with pytest.MonkeyPatch.context() as patch:
        # Small models: what cswap would leave alone as too small counts, too.
        patch.setenv("CSWAP_MIN_BYTES", "1KiB")
        patch.setattr(command, "N_THREADS", 1)
        patch.setattr(command, "SHARES", shares)
        patch.setattr("bench.fit.measure.SETTLING", settling)
        options = ["--quick", "--models", "gpt", "--rounds", "2", "--out", str(out)]
        result = CliRunner().invoke(app, ["fit", *options], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return out, result.output, json.loads(out.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("fit"), settling=40, shares=(0.75, 0.5, 0.01))


@pytest.mark.slow
def test_every_share_and_method_has_a_row(tmp_path):
    _, _, document = fit(tmp_path, settling=40, shares=(0.75, 0.01))
    assert document["complete"]
    rows = {(row["share"], row["method"]) for row in document["rows"]}
    assert {(None, OFF), *((share, m) for share in (0.75, 0.01) for m in (FIT, CHECKPOINT))} <= rows


@pytest.mark.slow
def test_goals_are_held_and_gradients_have_the_bits_of_off(found):
    _, _, document = found
    assert (document["kind"], document["version"], document["complete"]) == ("fit", 1, True)
    rows = {(row["share"], row["method"]): row for row in document["rows"]}
    assert next(iter(rows)) == (None, OFF)
    for share in (0.75, 0.5):
        row = rows[share, FIT]
        assert row["held"]
        assert row["bit_equal"]
        assert row["peak_bytes"] <= row["goal_bytes"]
        assert row["time_of_off"] > 0
    assert rows[0.75, FIT]["peak_bytes"] < rows[None, OFF]["peak_bytes"]


@pytest.mark.slow
def test_what_cannot_be_reached_says_so(found):
    _, output, document = found
    row = next(r for r in document["rows"] if (r["share"], r["method"]) == (0.01, FIT))
    assert row["smallest_bytes"] > row["goal_bytes"]
    assert row["held"] is None
    assert "cannot be reached; smallest" in output
    other = next(r for r in document["rows"] if (r["share"], r["method"]) == (0.01, CHECKPOINT))
    assert other["how"] == "cannot be reached"


def test_added_times_are_compared_where_both_are_known():
    base = {"model": "m", "share": 0.5}
    rows = [
        {**base, "method": FIT, "time_of_off": 1.1, "added_of_checkpoint": None},
        {**base, "method": CHECKPOINT, "time_of_off": 1.4, "added_of_checkpoint": None},
        {**base, "share": 0.35, "method": FIT, "time_of_off": 1.1, "added_of_checkpoint": None},
    ]
    values = [row["added_of_checkpoint"] for row in report.with_quotients(rows)]
    assert values == [pytest.approx(0.25), None, None]


@pytest.mark.slow
def test_the_picture_is_drawn(found):
    out, _, _ = found
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
