"""The figures in README.md and docs are those of the committed result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import bench.pages.readme
from bench.__main__ import app
from bench.drawing.steps import MIB
from bench.pages import first_picture, step_tables

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def test_tables_are_made_from_the_committed_results():
    done = CliRunner().invoke(app, ["readme", "--check"])
    assert done.exit_code == 0, done.output


def test_a_stale_table_is_noticed_and_made_anew(tmp_path, monkeypatch):
    page, text = tmp_path / "README.md", README.read_text()
    monkeypatch.setattr(bench.pages.readme, "PAGES", (page,))
    monkeypatch.setattr(bench.pages.readme, "PICTURES", {})
    monkeypatch.setattr(bench.pages.readme, "FIRST_PICTURE", tmp_path / "fit.png")
    page.write_text(text.replace("| plain |", "| plane |", 1))
    done = CliRunner().invoke(app, ["readme", "--check"])
    assert done.exit_code == 1
    assert "README.md is stale" in done.output
    assert "| plane |" in page.read_text()  # a check changes nothing
    assert CliRunner().invoke(app, ["readme"]).exit_code == 0
    assert page.read_text() == text


def test_a_stale_picture_is_noticed(tmp_path, monkeypatch):
    drawn, shown = tmp_path / "drawn.png", tmp_path / "shown.png"
    drawn.write_bytes(b"new")
    shown.write_bytes(b"old")
    monkeypatch.setattr(bench.pages.readme, "PAGES", ())
    monkeypatch.setattr(bench.pages.readme, "PICTURES", {drawn: shown})
    monkeypatch.setattr(bench.pages.readme, "FIRST_PICTURE", tmp_path / "fit.png")
    done = CliRunner().invoke(app, ["readme", "--check"])
    assert done.exit_code == 1
    assert "shown.png is stale" in done.output
    assert CliRunner().invoke(app, ["readme"]).exit_code == 0
    assert shown.read_bytes() == b"new"


def test_a_first_picture_of_other_results_is_noticed(tmp_path, monkeypatch):
    shown, results = tmp_path / "fit.png", tmp_path / "fit.json"
    monkeypatch.setattr(bench.pages.readme, "PAGES", ())
    monkeypatch.setattr(bench.pages.readme, "PICTURES", {})
    monkeypatch.setattr(bench.pages.readme, "FIRST_PICTURE", shown)
    assert CliRunner().invoke(app, ["readme"]).exit_code == 0
    assert shown.read_bytes().startswith(b"\x89PNG")
    assert CliRunner().invoke(app, ["readme", "--check"]).exit_code == 0
    results.write_text(first_picture.ON_A_CPU.read_text() + "\n")
    monkeypatch.setattr(first_picture, "ON_A_CPU", results)
    done = CliRunner().invoke(app, ["readme", "--check"])
    assert done.exit_code == 1
    assert "fit.png is stale" in done.output


def marked(text):
    """Names of the blocks in a page that stand between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    return re.findall(r"<!-- ([a-z][\w ]*) -->\n.*?<!-- /\1 -->", text, re.S)


def unmarked_tables(page):
    text = re.sub(
        r"<!-- ([a-z][\w ]*) -->\n.*?<!-- /\1 -->", "", page.read_text("utf-8"), flags=re.S
    )
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    return [line for line in text.splitlines() if line.startswith("|")]


IN_README: Final = "transformer"
"""The table of the README and of the home page: a reader sees one of them."""


def test_every_marked_block_is_filled_and_every_table_is_shown_once():
    from bench.pages.readme import PAGES, TABLES

    pages = [README, *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text("utf-8") for page in pages}
    blocks = {page: marked(text) for page, text in texts.items()}
    assert {page for page, names in blocks.items() if names} == set(PAGES)
    in_docs = [name for page, names in blocks.items() if page != README for name in names]
    assert sorted(in_docs) == sorted(TABLES)
    assert blocks[README] == [IN_README]
    assert IN_README in blocks[ROOT / "docs" / "index.md"]
    # A misspelt mark would have an end without a block.
    ends = {page: re.findall(r"<!-- /([\w ]+) -->", text) for page, text in texts.items()}
    assert ends == blocks


def test_long_tables_are_folded_and_short_ones_are_not():
    from bench.pages.folding import MOST_ROWS
    from bench.pages.readme import PAGES

    for page in PAGES:
        text = page.read_text("utf-8")
        shut = re.findall(r"<details markdown=.*?</details>", text, re.S)
        open_ = re.sub(r"<details markdown=.*?</details>", "", text, flags=re.S)
        for part, is_long in [*((part, True) for part in shut), (open_, False)]:
            for table in re.findall(r"(?:^\|.*\n)+", part, re.M):
                assert (table.count("\n") - 2 > MOST_ROWS) == is_long, table[:99]


def test_a_part_of_a_page_shows_its_picture_before_its_tables():
    from bench.pages.readme import PAGES

    for page in PAGES:
        for part in re.split(r"^##+ ", page.read_text("utf-8"), flags=re.M):
            picture, table = re.search(r"^!\[", part, re.M), re.search(r"^\|", part, re.M)
            assert not (picture and table) or picture.start() < table.start(), part[:60]


def test_a_table_by_hand_holds_no_measured_figure():
    allowed = {
        ("options.md", "| `guard_error` | 0.25 |"),  # a default: see below
        *(("lossy.md", f"| `{name}` |") for name in ("bf16", "int8", "fp8")),  # see test_docs.py
    }
    for page in [README, *(ROOT / "docs").glob("*.md")]:
        if page.name == "format.md":  # numbers there are of the format
            continue
        for row in unmarked_tables(page):
            if re.search(r"\d\.\d|\d ?(?:[mun]s\b|[GM]B/s)", row):
                assert any(page.name == p and row.startswith(r) for p, r in allowed), row


def test_the_defaults_in_the_table_of_options_are_those_of_the_code():
    from dataclasses import fields

    from cswap.config import SwapConfig

    options = (ROOT / "docs" / "options.md").read_text("utf-8")
    rows = [row.split("|")[1:3] for row in options.splitlines() if row.startswith("|")]
    shown = {n: cell.strip() for names, cell in rows for n in re.findall(r"`(\w+)`", names)}
    defaults = {field.name: field.default for field in fields(SwapConfig)}
    words = {"None": "none", "False": "off", "()": "all"}
    expected = {
        name: f'`"{default}"`'
        if isinstance(default, str)
        else words.get(str(default), str(default))
        for name, default in defaults.items()
    }
    # None, but not for "no limit"
    assert shown == {
        **expected,
        "min_bytes": "64 KiB",
        "recompute": "none",
    }


def test_the_readme_is_short():
    text = README.read_text("utf-8")
    assert len(text.splitlines()) <= 120
    assert len(re.findall(r"^\| ?---", text, re.MULTILINE)) <= 2


def test_what_the_readme_says_of_the_h200_is_so():
    text = " ".join(README.read_text("utf-8").split())
    data = json.loads((ROOT / "bench/results/nvidia-h200/training.json").read_text("utf-8"))
    rows: dict[str, dict[str, tuple[float, float]]] = {}
    for r in data["rows"]:
        if r["step_ms"] is not None:
            rows.setdefault(r["model"], {})[r["method"]] = r["peak_allocated_bytes"], r["step_ms"]
    plain_ms = {model: ways.pop("no swapping")[1] for model, ways in rows.items()}
    ours, others = (
        {
            model: [v for k, v in ways.items() if k.startswith("cswap") == own]
            for model, ways in rows.items()
        }
        for own in (True, False)
    )
    checkpoint_ms = rows["GPT-2 small"]["checkpoint"][1]
    assert "On GPT-2 small, cswap's peak was then the highest of all ways to save memory" in text
    assert min(ours["GPT-2 small"])[0] > max(others["GPT-2 small"])[0]
    assert (
        "its step was longer than checkpointing's, though shorter than that of other ways to"
        in text
    )
    ours_ms = [ms for _, ms in ours["GPT-2 small"]]
    assert min(ours_ms) > checkpoint_ms
    assert all(ms > max(ours_ms) or ms == checkpoint_ms for _, ms in others["GPT-2 small"])
    assert "On an H200, a step of GPT-2 small took more than twice its time when all that" in text
    assert min(ours_ms) > 2 * plain_ms["GPT-2 small"]
    assert "On ResNet-50, its peak was the lowest and its step by far the longest" in text
    (peak, ms), (other_peak, other_ms) = (max(r["ResNet-50"]) for r in (ours, others))
    assert peak < other_peak
    assert ms > 3 * other_ms
    which = " ".join((ROOT / "docs" / "which.md").read_text("utf-8").split())
    assert "A step of ResNet-50 took five times as long" in which
    assert round(ms / plain_ms["ResNet-50"]) == 5
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text("utf-8").split())
    assert "on GPT-2 small each of its peaks is above those of checkpointing, `save_on" in page
    assert "each of its steps is longer than checkpointing's. On ResNet-50 its peak is the" in page
    assert "its step is about four times checkpointing's." in page
    assert round(ms / rows["ResNet-50"]["checkpoint"][1]) == 4


def test_what_decisions_says_of_the_default_on_a_gpu_is_so():
    text = " ".join((ROOT / "docs" / "decisions.md").read_text("utf-8").split())
    rows = json.loads((ROOT / "bench/results/twin/h200-pcie5.json").read_text("utf-8"))["rows"]

    def of_plain(method: str, figure: str) -> str:
        found = {
            way: [row[figure] for row in rows if row["method"] == way] for way in ("plain", method)
        }
        first, second, third = (
            f"{mine / plain:.2f}" for mine, plain in zip(found[method], found["plain"], strict=True)
        )
        return f"{first}, {second} and {third}"

    peaks, times = of_plain("default", "peak_bytes"), of_plain("default", "step_s")
    device = 'fit="device"'
    assert f"the default's peaks are {peaks} of the plain step's (GPT-2 small, Res" in text
    assert f"Llama blocks) at {times} of its time;" in text
    assert of_plain(device, "peak_bytes") == "1.00, 1.00 and 1.00"
    assert f"has 1.00 of each peak, at {of_plain(device, 'step_s')} (`bench" in text


def test_benchmarks_names_the_models_that_gain_little():
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    named = re.findall(r"^- \*\*`([\w-]+)`: ", text, re.MULTILINE)
    rows = [
        row
        for name in ("workloads", "workloads-second")
        for row in json.loads((ROOT / f"bench/results/cpu/{name}.json").read_text("utf-8"))["rows"]
        if row["way"] == "cswap"
    ]
    above = [r for r in rows if min(r["held_of_plain"], r["peak_of_plain"]) > 0.75]
    assert sorted(named) == sorted(row["workload"] for row in above)


def first_part(page):
    """The text before the page's first code: its links as from the folder docs."""
    text = page.read_text("utf-8").split("## Five lines")[0].split("```")[0]
    return " ".join(text.replace("(docs/", "(").split())


def test_readme_and_home_page_begin_alike():
    readme, home = (first_part(page) for page in (README, ROOT / "docs" / "index.md"))
    shown = re.sub(r'<img src="docs/([^"]+)" width="\d+" alt="([^"]+)">', r"![\2](\1)", readme)
    assert shown == home
    pictures = re.findall(r"!\[[^]]+\]\((.+?)\)", home)
    assert pictures == [bench.pages.readme.FIRST_PICTURE.name]


def cpu_goals():
    """Rows of the first table's model: of cswap and of checkpointing, by goal."""
    rows = [
        row
        for row in json.loads(first_picture.ON_A_CPU.read_text("utf-8"))["rows"]
        if row["model"] == step_tables.TRANSFORMER
    ]
    mine, its = (
        {row["share"]: row for row in rows if row["method"] == method}
        for method in ("fit", "checkpoint")
    )
    assert len(mine) > 1
    assert set(mine) == set(its)
    return [(mine[share], its[share]) for share in mine]


def twin_goals(file):
    """Rows of each model: of cswap's goal at checkpointing's peak, and of checkpointing."""
    by_model: dict[str, dict[str, Any]] = {}
    for row in json.loads((ROOT / "bench/results/twin" / file).read_text("utf-8"))["rows"]:
        by_model.setdefault(row["model"], {})[row["method"]] = row
    return {
        model: (ways["fit=checkpoint's peak"], ways["checkpoint"])
        for model, ways in by_model.items()
    }


def test_at_every_goal_of_the_first_picture_cswap_takes_less_time():
    words = "At every goal, a median step takes less time with cswap than with PyTorch's check"
    assert all(words in first_part(page) for page in (README, ROOT / "docs" / "index.md"))
    for mine, its in cpu_goals():
        assert mine["held"]
        assert its["held"]
        assert mine["time_of_off"] < its["time_of_off"], mine["share"]
    mine, its = twin_goals(first_picture.ON_A_GPU.name)[first_picture.GPU_MODEL]
    assert mine["peak_bytes"] <= its["peak_bytes"]
    assert mine["step_s"] < its["step_s"]


def test_what_the_readme_says_below_its_table_is_so():
    text = " ".join(README.read_text("utf-8").split())
    assert "At each, checkpointing held fewer bytes than cswap, and took more time." in text
    for mine, its in cpu_goals():
        assert its["peak_bytes"] < mine["peak_bytes"]
        assert its["time_of_off"] > mine["time_of_off"]


def test_what_the_page_says_of_goals_on_the_twin_is_so():
    text = " ".join((ROOT / "docs" / "twin.md").read_text("utf-8").split())
    files = ("h200-pcie5.json", "h200-more-models.json")
    found = {model: pair for file in files for model, pair in twin_goals(file).items()}
    quotients = {model: mine["step_s"] / its["step_s"] for model, (mine, its) in found.items()}
    assert "each of the nine models takes less time than with checkpointing" in text
    assert len(quotients) == 9
    assert max(quotients.values()) < 1
    assert "GPT-2 medium gains the least" in text
    assert max(quotients, key=quotients.__getitem__) == "gpt2-medium"


def test_the_first_table_has_each_goal_that_was_held_and_counts_saved_bytes_alone(monkeypatch):
    made_by = {"command": "c", "cpu": "x", "n_cpus": 2, "versions": {"torch": "2"}}
    # Beside 100 MiB that are resident, shares of 40 MiB. A goal that was not held is none.
    held = {"held": True, "time_of_off": 1.2, "bit_equal": True, "how": "2 of 4 blocks"}
    missed = {**held, "held": False}
    never = {**held, "held": None, "time_of_off": None, "how": "cannot be reached"}
    half, quarter = ({"share": s, "goal_bytes": (100 + 40 * s) * MIB} for s in (0.5, 0.25))
    rows = [
        {**held, "share": None, "method": "off", "peak_bytes": 140 * MIB, "held": None},
        {**half, "method": "fit", "peak_bytes": 116 * MIB, **held},
        {**half, "method": "checkpoint", "peak_bytes": 110 * MIB, **held},
        {**quarter, "method": "fit", "peak_bytes": 111 * MIB, **missed},
        {**quarter, "method": "checkpoint", "peak_bytes": None, **never},
    ]
    files = {
        "fit.json": {
            "rows": [{"model": step_tables.TRANSFORMER, **row} for row in rows],
            "environment": made_by,
        }
    }
    monkeypatch.setattr(step_tables, "load", files.__getitem__)
    (_, _, *lines), below = (
        part.splitlines() for part in step_tables.transformer_table().split("\n\n")
    )
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert [tuple(c[:3]) for c in cells] == [
        ("plain", "40.0", "100%"),
        ("a goal of 50%: `cswap.install(model, fit=...)`", "16.0", "40%"),
        ("a goal of 50%: `torch.utils.checkpoint`, 2 of 4 blocks", "10.0", "25%"),
    ]
    assert below == ["Measured by `c` on x, 2 cores, torch 2; file: `bench/results/cpu/fit.json`."]
