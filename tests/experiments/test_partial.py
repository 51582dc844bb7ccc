"""Long benchmarks go on where they were interrupted."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from bench.__main__ import app
from bench.advisor import command as advisor
from cswap.errors import ConfigError
from cswap.experiments.codecs import contenders, measuring
from cswap.experiments.files import environment
from cswap.experiments.files import resumable as partial
from cswap.experiments.files.resumable import Partial, stored
from cswap.experiments.files.writing import write


def begin(out, **changes):
    return Partial(out, **{"kind": "k", "version": 1, "settings": {"a": 1}, **changes})


def forbidden():
    raise AssertionError("made again")


def test_parts_are_made_once_and_the_result_is_written_at_the_end(tmp_path):
    out = tmp_path / "folder" / "result.json"
    first = begin(out)
    assert first.part("x", lambda: [1, 2]) == [1, 2]
    assert not out.exists()
    second = begin(out)
    assert second.went_on == 1
    assert second.part("x", forbidden) == [1, 2]
    assert second.part("y", lambda: [3]) == [3]
    document = second.finish(rows=[1, 2, 3])
    assert json.loads(out.read_text()) == document
    assert [file.name for file in out.parent.iterdir()] == ["result.json"]
    assert (document["kind"], document["version"], document["complete"]) == ("k", 1, True)
    assert document["rows"] == [1, 2, 3]
    assert "done" not in document


@pytest.mark.parametrize(
    "changes", [{"kind": "l"}, {"version": 2}, {"settings": {"a": 2}}, {"again": True}]
)
def test_another_experiment_is_begun_anew(changes, tmp_path):
    out = tmp_path / "result.json"
    begin(out).part("x", lambda: 1)
    assert begin(out, **changes).went_on == 0
    assert begin(out).went_on == 1


@pytest.mark.parametrize("content", ["", "{", "[1]", "\udcff"])
def test_what_cannot_be_read_is_begun_anew(content, tmp_path):
    out = tmp_path / "result.json"
    begin(out).path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert begin(out).went_on == 0
    assert stored(begin(out).path) is None


def test_a_stored_document_must_have_the_fields_asked_for(tmp_path):
    path = tmp_path / "result.json"
    path.write_text('{"version": 1, "rows": []}')
    assert stored(path) == stored(path, version=1) == {"version": 1, "rows": []}
    assert stored(path, version=2) is None
    assert stored(path, version=1, settings=None) == stored(path)  # as good as not there
    assert stored(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("accuracy", "--models"),
        ("accuracy", "--policies"),
        ("codecs", "--families"),
        ("fit", "--models"),
        ("swap", "--methods"),
    ],
)
def test_unknown_names_get_one_line(command, option, tmp_path):
    out = str(tmp_path / "out")
    result = CliRunner().invoke(app, [command, option, "nonsense", "--out", out])
    assert result.exit_code == 2
    assert result.output.splitlines() == [result.output.rstrip("\n")]
    assert result.output.startswith(f"{option} 'nonsense': unknown nonsense; known are ")
    assert not list(tmp_path.iterdir())


def test_figures_of_different_code_are_not_mixed(tmp_path, monkeypatch):
    def of(code, commit):
        return lambda: {"cswap_commit": commit, "code": code}

    out = tmp_path / "result.json"
    monkeypatch.setattr(partial, "environment", of("1", "first"))
    begin(out).part("x", lambda: 1)
    monkeypatch.setattr(partial, "environment", of("1", "second"))
    assert begin(out).went_on == 1  # a commit that leaves the measured code as it was
    monkeypatch.setattr(partial, "environment", of("2", "second"))
    assert begin(out).went_on == 0


def test_the_digest_of_the_code_changes_with_any_source(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    (tmp_path / "cswap").mkdir()
    digests = []
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", ""), ("a.txt", "")):
        (tmp_path / "cswap" / name).write_text(text)
        environment.code_digest.cache_clear()
        digests.append(environment.code_digest())
    environment.code_digest.cache_clear()
    assert len(set(digests[:3])) == 3
    assert digests[3] == digests[2]


def test_an_unreadable_unfinished_file_counts_as_none(tmp_path):
    out = tmp_path / "result.json"
    for text in ("{", "[]", "{}"):
        out.with_suffix(".partial.json").write_text(text)
        assert begin(out).went_on == 0


def test_without_a_result_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert begin(None).part("x", lambda: 1) == 1
    begin(None).finish()
    assert not list(tmp_path.iterdir())


def test_codecs_go_on(tmp_path, monkeypatch):
    out, measured, real = tmp_path / "codecs.json", [], contenders.measure

    def measure(case, rounds, names):
        measured.append(case.data)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return real(case, 1, names)

    monkeypatch.setattr(measuring, "measure", measure)

    def run():
        options = ["--quick", "--families", "values", "--codecs", "raw", "--threads", "1"]
        return CliRunner().invoke(app, ["codecs", *options, "--out", str(out)])

    interrupted = run()
    assert interrupted.exit_code == 130
    assert "Interrupted: the same command goes on from here." in interrupted.output
    assert not out.exists()
    result = run()
    assert result.exit_code == 0, result.output
    assert "Going on: 2 data sets" in result.output
    assert measured[2] == measured[3]
    rows = json.loads(out.read_text())["rows"]
    assert len({(row["data"], row["dtype"], row["codec"]) for row in rows}) == len(rows)
    assert {row["data"] for row in rows} == set(measured)


def test_a_command_that_keeps_nothing_says_so(monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(advisor, "environment", interrupted)
    result = CliRunner().invoke(app, ["advisor", "--quick"])
    assert result.exit_code == 130
    assert "Interrupted: nothing is written." in result.output


def test_a_result_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "file" / "result.json", {})
