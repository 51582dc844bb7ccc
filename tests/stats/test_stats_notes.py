"""Every saved tensor is counted with its bytes, and stats say why little memory was saved."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cswap
from cswap.hooks import Swapping
from cswap.report import explain
from cswap.stats.counters import Counters
from cswap.stats.keep_reasons import REASONS
from cswap.stats.stats import ONLY_PARAMETERS, CodecStats, Stats, notes
from cswap.units import show_bytes
from tests.engine.engines import engine_over_a_link

MIB = 1 << 20
SOURCES = [
    *Path(cswap.__file__).parent.glob("engine/**/*.py"),
    Path(cswap.__file__).parent / "api.py",
]


CALLS = {"keep": 0, "stay": 0, "_keep": 1, "stay_early": 0, "NoRoomError": 0, "_leave_in_place": 1}
"""Functions, and at which place they take a reason."""


def reasons_named(path):
    """Texts where a source names a reason: in calls of keep and stay, in `reason` and `keep`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            at = CALLS.get(called)
            named: list[ast.expr | None] = [] if at is None else [*node.args[at : at + 1]]
            named += [
                k.value for k in node.keywords if k.arg == "keep" and isinstance(k.value, ast.IfExp)
            ]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(
            node.targets[0] if isinstance(node, ast.Assign) else node.target
        ) in ("reason", "recipe.keep", "EXCLUDED", "SAVED_AGAIN", "BY_BUDGET", "BY_PLAN"):
            named = [node.value]
        elif isinstance(node, ast.FunctionDef) and node.name == "reason_to_keep":
            named = [r.value for r in ast.walk(node) if isinstance(r, ast.Return)]
        else:
            continue
        yield from (
            text.value
            for part in named
            if part is not None
            for text in ast.walk(part)
            if isinstance(text, ast.Constant) and isinstance(text.value, str)
        )


def swapped(encoded, *, raw=100 * MIB, host_is_device=True, **kept):
    return Stats(
        packed=9,
        swapped=5,
        raw_bytes=raw,
        encoded_bytes=encoded,
        by_codec={"zvc": CodecStats(5, raw, encoded)},
        kept_by_reason=dict.fromkeys(kept, 1),
        kept_bytes_by_reason=kept,
        host_is_device=host_is_device,
    )


def test_every_reason_that_the_engine_names_has_words_and_a_remedy():
    named = {name for path in SOURCES for name in reasons_named(path)}
    assert named == set(REASONS)
    assert all(reason.why and reason.remedy for reason in REASONS.values())


def test_bytes_are_counted_with_every_reason():
    big, small = torch.randn(512, 512, requires_grad=True), torch.randn(8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(512, 512))
    with cswap.swapping(codec="raw") as engine:
        loss = (big.exp() @ weight).sum() + small.exp().sum()
        sparse = torch.eye(8).to_sparse().requires_grad_()
        loss = loss + torch.sparse.mm(sparse, torch.ones(8, 1)).sum()
    loss.backward()
    stats = engine.stats
    kept = stats.kept_bytes_by_reason
    assert set(kept) == set(stats.kept_by_reason)
    assert kept["parameter"] == MIB
    assert kept["small"] == sum(t.nbytes for t in (small, torch.ones(8, 1)))
    assert kept["layout"] == 0  # a COO tensor has no size of its own
    assert stats.raw_bytes == MIB  # exp's result, saved by exp and by the product
    assert stats.packed == stats.swapped + stats.deduplicated + sum(stats.kept_by_reason.values())


def test_a_tensor_without_elements_is_small_for_any_limit():
    with cswap.swapping(codec="raw", min_bytes=0) as engine:
        y = torch.empty(0, 4, requires_grad=True).exp()
    assert (engine.stats.packed, engine.stats.kept_by_reason) == (1, {"small": 1})
    del y


def test_seconds_of_compiling_are_counted(monkeypatch):
    monkeypatch.setattr("cswap.engine.sender.WARM", set())
    monkeypatch.setattr("cswap.engine.sender.warm", lambda *_: 1.5)
    with cswap.swapping(codec="raw", min_bytes=0) as engine:
        y = torch.randn(64, requires_grad=True).exp()
    assert engine.stats.compile_s == 1.5
    del y


def test_what_is_dropped_while_it_is_on_its_way_is_held_no_more():
    with Swapping(engine_over_a_link(0, codec="zvc", min_bytes=0)) as engine:
        y = torch.randn(64, 64, requires_grad=True).exp()
        del y
        stats = engine.stats
        assert (stats.packed, stats.kept_by_reason) == (1, {})
        assert (stats.device_bytes, stats.host_bytes) == (0, 0)


def test_nothing_is_said_where_much_was_saved():
    assert notes(swapped(75 * MIB)) == []
    assert notes(swapped(100 * MIB, host_is_device=False)) == []  # all of it has left
    assert notes(swapped(70 * MIB, parameter=900 * MIB)) == []  # they could not be saved


def test_the_largest_reasons_come_first_with_bytes_and_remedy():
    said = notes(swapped(100 * MIB, does_not_pay=300 * MIB, small=MIB, excluded=150 * MIB))
    assert said[0] == "Little was saved: 0 B of 551.0 MiB (0%). Most of the rest:"
    assert said[1].startswith("  300.0 MiB kept: does_not_pay (")
    assert 'lossy="int8"' in said[1]
    assert said[2].startswith("  150.0 MiB kept: excluded (")
    assert "include=" in said[2]
    assert said[3].startswith("  100.0 MiB encoded (ratio 1.00;")
    assert len(said) == 4  # the small ones are too few to be worth a line


def test_of_parameters_no_bytes_are_named():
    said = notes(swapped(MIB, raw=MIB, parameter=412 * MIB))
    assert [line.split(" (")[0] for line in said[1:]] == ["  1.0 MiB encoded"]
    stats = Stats(packed=3, kept_bytes_by_reason={"parameter": 9})
    assert notes(stats) == [ONLY_PARAMETERS]
    assert notes(replace(stats, steps=1)) == [ONLY_PARAMETERS]


def test_notes_are_of_the_last_step():
    stats = Stats(
        packed=900,
        host_is_device=True,
        raw_bytes=900 * MIB,
        encoded_bytes=30 * MIB,
        kept_bytes_by_reason={"does_not_pay": 2000 * MIB},
        steps=100,
        step_plain_bytes=29 * MIB,
        step_gained_bytes=6 * MIB,
        step_encoded_bytes=3 * MIB,
        step_kept_by_reason={"does_not_pay": 2, "goal": 1},
        step_kept_bytes_by_reason={"does_not_pay": 20 * MIB, "goal": 1},
    )
    said = notes(stats)
    assert said[0] == "Little was saved: 6.0 MiB of 29.0 MiB (21%). Most of the rest:"
    assert [line.split(" (")[0] for line in said[1:]] == [
        "  20.0 MiB kept: does_not_pay",
        "  3.0 MiB encoded",
    ]
    assert "ratio 3.00" in said[2]
    assert notes(replace(stats, step_gained_bytes=8 * MIB)) == []
    assert notes(replace(stats, step_gained_bytes=-1))[0].startswith("Little was saved: 0 B of 29")


@pytest.mark.parametrize(("mean_bytes", "worth"), [(300, False), (60 << 10, False), (MIB, True)])
def test_a_lower_min_bytes_is_proposed_where_it_changes_something(mean_bytes, worth):
    stats = Stats(
        packed=100,
        host_is_device=True,
        steps=1,
        step_plain_bytes=100 * mean_bytes,
        step_kept_by_reason={"small": 100},
        step_kept_bytes_by_reason={"small": 100 * mean_bytes},
    )
    (line,) = notes(stats)[1:]
    assert ("lower min_bytes" in line) == worth
    assert (f"{show_bytes(mean_bytes)} on average" in line) == (not worth)


class Marked(torch.Tensor):
    """Of a class that says nothing of its parts."""


def test_notes_and_stats_name_the_classes_that_stay():
    with cswap.swapping(codec="raw", min_bytes=0) as engine:
        x = torch.randn(64, 64).as_subclass(Marked).requires_grad_()
        y = x.exp().sin()  # exp's result is saved before it is of the class
        plain = torch.randn(8, requires_grad=True).exp()
    stats = engine.stats
    assert (stats.kept_by_reason["subclass"], stats.subclasses) == (1, {"Marked": 1})
    assert "  16.0 KiB kept: subclass (Marked) (of a tensor subclass" in "\n".join(notes(stats))
    assert re.search(r"^subclass Marked +1$", str(stats), re.MULTILINE)
    del y, plain


def test_a_gpus_encodings_count_as_gone_and_what_stayed_does_not():
    said = notes(swapped(5 * MIB, raw=10 * MIB, host_is_device=False, host_limit=90 * MIB))
    assert said[0].startswith("Little was saved: 10.0 MiB of 100.0 MiB (10%)")
    assert [line.split(" (")[0] for line in said[1:]] == ["  90.0 MiB kept: host_limit"]


def test_hooks_that_saw_nothing_say_so():
    model = torch.nn.Linear(8, 8)
    with cswap.install(model) as handle:
        assert str(handle).startswith("cswap: no step yet")
    model(torch.ones(8)).sum().backward()  # after they were removed
    assert "saved nothing" in str(handle.stats)


@pytest.mark.parametrize("kept", [{"small": MIB}, {}])
def test_printed_stats_and_the_saved_record_have_the_notes(kept, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sigmoid())
    with cswap.install(model, min_bytes="1GiB" if kept else 0, codec="raw") as handle:
        model(torch.randn(256, 64)).sum().backward()
    said = handle.stats.notes()
    assert said
    assert str(handle.stats).endswith("\n".join(said))
    assert ("kept: small" in said[1]) == bool(kept)
    path = tmp_path / "stats.json"
    handle.engine.save(path)
    assert explain.notes(explain.load(path)) == said


def test_a_peak_of_both_is_seen_though_neither_is_at_its_own():
    counters = Counters()
    counters.hold(device=4)
    counters.hold(device=-4)
    counters.hold(host=4)
    counters.hold(host=-2)
    counters.hold(device=3)
    found = counters.snapshot()
    assert (found.peak_device_bytes, found.peak_host_bytes, found.peak_saved_bytes) == (4, 4, 5)


@pytest.mark.parametrize("by_a_model", [True, False])
def test_the_gain_of_a_step_is_that_of_one_step(by_a_model):
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU()), torch.randn(256, 8)
    options: Any = {"min_bytes": 0, "codec": "zvc", "remat": False}

    def gains(stats, n):
        found = []
        for _ in range(n):
            model(x).sum().backward()
            found.append(stats().step_gained_bytes)
        return found

    if by_a_model:
        with cswap.install(model, **options) as handle:
            first, *others = gains(lambda: handle.stats, 5)
            assert str(handle).split("\n")[0] == f"cswap: {handle.stats.gain()}"
    else:
        with cswap.swapping(**options) as engine:
            first, *others = gains(lambda: engine.stats, 5)
    assert first > 0.3 * 256 * 64 * 4
    assert others == 4 * [first]
