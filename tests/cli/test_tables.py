"""Tables by the width of a terminal: fewer columns, no broken words, one line per row in a pipe."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from cswap.report import terminal

pytest.importorskip("typer")

from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from cswap import cli

EXAMPLES = Path(__file__).parents[1] / "examples"


def table():
    made = terminal.new_table("codec", "ratio", "of memcpy", "why")
    why = "nothing pays by five percent on this machine at the moment"
    terminal.add_rows(made, [("zvc+expk", "2.13", "1.07", why)] * 2)
    return made


def printed(made, width, *, is_terminal=True, drop=()):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=is_terminal, no_color=True)
    terminal.show(made, drop=drop, console=console)
    return [line.rstrip() for line in out.getvalue().replace("\x1b[1m", "").split("\n")]


def plain(lines):
    return [line.replace("\x1b[0m", "").rstrip() for line in lines]


def test_a_wide_terminal_gets_every_column_on_one_line():
    lines = plain(printed(table(), 120))
    assert lines[0].split() == ["codec", "ratio", "of", "memcpy", "why"]
    assert len(lines) == 4


def test_a_narrow_terminal_gets_fewer_columns_and_whole_words():
    lines = plain(printed(table(), 44, drop=("of memcpy", "ratio")))
    assert lines[0].split() == ["codec", "ratio", "why"]
    assert " ".join(" ".join(lines[1:4]).split()).startswith("zvc+expk 2.13 nothing pays by five")
    assert "Left out for lack of width: of memcpy." in lines
    words = set(" ".join(lines).split())
    assert {"nothing", "percent", "machine", "moment", "zvc+expk"} <= words
    assert all(len(line) <= 44 for line in lines)


def test_a_very_narrow_terminal_keeps_the_first_column():
    lines = plain(printed(table(), 12))
    assert lines[:3] == ["codec", "zvc+expk", "zvc+expk"]


def test_figures_that_must_not_be_wrapped_are_left_out_not_cut():
    made = Table()
    for heading in ("data", "x", "x", "error"):
        made.add_column(heading, no_wrap=True)
    made.add_row("0 AddmmBackward0 float32", "0.32", "10.25", "6.1e-03")
    lines = plain(printed(made, 46, drop=("x", "x")))
    assert "…" not in "".join(lines)
    assert "6.1e-03" in "".join(lines)
    assert "10.25" not in "".join(lines)


def test_a_pipe_gets_every_column_and_a_line_per_row():
    lines = printed(table(), 40, is_terminal=False)
    assert len(lines) == 4
    assert lines[1].endswith("at the moment")


def test_a_word_without_end_is_broken_rather_than_taking_all_columns():
    made = terminal.new_table("saved in", "codec")
    terminal.add_rows(made, [("x" * 300, "zvc")])
    lines = plain(printed(made, 60))
    assert lines[0].split() == ["saved", "in", "codec"]
    assert "".join(lines[1:]).count("x") == 300


def invoke(*arguments):
    done = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done


def test_commands_print_csv_and_json_as_asked():
    file = EXAMPLES / "stats.json"
    done = invoke("explain", file, "--format", "csv")
    rows = list(csv.reader(io.StringIO(done.stdout)))
    assert rows[0][:2] == ["#", "saved in"]
    assert len(rows) == 1 + len(json.loads(file.read_text())["sites"])
    assert "call sites" in done.stderr  # beside the rows, not among them
    assert json.loads(invoke("explain", file, "--format", "json").stdout) == json.loads(
        invoke("explain", file, "--json").stdout
    )
    names = [row[0] for row in csv.reader(io.StringIO(invoke("codecs", "--format", "csv").stdout))]
    assert "zvc" in names
