"""`python -m bench stale`: results that are older than the code that they measure."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from bench.__main__ import app
from bench.files import stale
from cswap.experiments.files.kinds import KINDS
from cswap.experiments.files.measured_code import (
    MEASURED,
    ROOT,
    digest,
    fingerprint,
    measured,
    paths_of,
)

CODE = '"""A module."""\n\nRATE = 3  # per second\n'


@pytest.fixture
def root(tmp_path):
    """A repository's folder with one package and one result that measures it."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text(CODE)
    (tmp_path / "engine" / "notes.md").write_text("not code")
    return tmp_path


def result(root, **environment):
    path = root / "result.json"
    record = {"paths": ["engine"], "files": fingerprint(["engine"], root)}
    about = {"measures": record, "command": "python -m bench swap", **environment}
    path.write_text(json.dumps({"kind": "swap", "environment": about, "rows": []}))
    return path


def test_a_result_of_the_code_as_it_is_is_not_stale(root):
    found = stale.check(result(root), root)
    assert (found.is_stale, found.changed, found.why) == (False, (), "")
    assert (found.name, found.command) == ("result.json", "python -m bench swap")


@pytest.mark.parametrize(
    ("text", "is_stale"),
    [
        ('"""Another docstring."""\nRATE = 3\n', False),
        ("# a comment\nRATE = (\n    3\n)\n", True),  # brackets are tokens of the code
        ("RATE = 4\n", True),
        ("RATE = 3\nRATE = 3\n", True),
    ],
)
def test_only_code_counts(root, text, is_stale):
    path = result(root)
    (root / "engine" / "a.py").write_text(text)
    assert stale.check(path, root).is_stale is is_stale


def test_new_and_removed_files_are_changes(root):
    path = result(root)
    (root / "engine" / "b.py").write_text("x = 1\n")
    assert stale.check(path, root).changed == ("engine/b.py",)
    (root / "engine" / "b.py").write_text('"""Only a docstring."""\n')
    assert stale.check(path, root).changed == ()
    (root / "engine" / "a.py").unlink()
    assert stale.check(path, root).changed == ("engine/a.py",)
    assert stale.check(path, root).is_stale


def test_code_that_the_measured_device_never_runs_does_not_count(root, monkeypatch):
    monkeypatch.setitem(MEASURED, "swap", ("engine", "!engine/gpu.py"))
    path = result(root)  # its record is from before the exception
    (root / "engine" / "gpu.py").write_text("x = 1\n")
    assert not stale.check(path, root).is_stale
    (root / "engine" / "gpu2.py").write_text("x = 1\n")
    assert stale.check(path, root).changed == ("engine/gpu2.py",)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("f(1, 2)", "f(\n    1,\n    2,\n)"),
        ("x = f'{a} # {b}'  # c", "x = f'{a} # {b}'"),
        ('def f():\n    """Doc."""\n    return 1', "def f():\n\n    return 1"),
    ],
)
def test_layout_does_not_count(one, other):
    assert digest("a.py", one + "\n") == digest("b.py", other + "\n")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 'a'", "x = 'b'"),
        ("x = f'{a}'", "x = f'{b}'"),
        ("if a:\n    f()\ng()", "if a:\n    f()\n    g()"),
    ],
)
def test_code_counts(one, other):
    assert digest("a.py", one + "\n") != digest("a.py", other + "\n")


def test_data_files_count_as_they_are():
    assert digest("a.json", "{}") != digest("a.json", "{ }")


def git(root, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = [str(shutil.which("git")), *who, *arguments]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_file_without_digests_is_compared_by_its_commit(root, monkeypatch):
    monkeypatch.setitem(MEASURED, "swap", ("engine",))
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    path = result(root, measures=None, cswap_commit=git(root, "rev-parse", "HEAD"))
    assert not stale.check(path, root).is_stale
    (root / "engine" / "a.py").write_text("RATE = 4\n")
    git(root, "commit", "-qam", "second")
    found = stale.check(path, root)
    assert (found.changed, found.commits) == (("engine/a.py",), 1)
    unknown = result(root, measures=None, cswap_commit="0" * 40)
    assert "commit is not known" in stale.check(unknown, root).why
    modified = result(root, measures=None, cswap_modified=True)
    assert "not committed" in stale.check(modified, root).why


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("text", "is_stale"),
    [
        ('RATE = 3\nSLOW = "It takes a minute."\n', False),
        ('RATE = 4\nSLOW = "It takes a minute."\n', True),
        ('RATE = 3\nSLOW = "prmt.b32 a b;"\n', True),  # code of another language
    ],
)
def test_another_message_to_a_person_does_not_count(root, text, is_stale):
    (root / "engine" / "a.py").write_text('RATE = 3\nSLOW = "It takes ten seconds."\n')
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    path = result(root, cswap_commit=git(root, "rev-parse", "HEAD"))
    (root / "engine" / "a.py").write_text(text)
    assert stale.check(path, root).is_stale is is_stale
    no_commit = result(root, cswap_commit="")
    (root / "engine" / "a.py").write_text('RATE = 3\nSLOW = "It takes an hour."\n')
    assert stale.check(no_commit, root).is_stale


def test_the_command_lists_what_is_stale_and_refuses_it(root, monkeypatch):
    path = result(root)
    monkeypatch.setattr(stale, "check", lambda p: CHECK(p, root))
    runner = CliRunner()
    done = runner.invoke(app, ["stale", str(root)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    (root / "engine" / "a.py").write_text("RATE = 4\n")
    done = runner.invoke(app, ["stale", str(root)], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    for text in (path.name, "engine (1)", "again: python -m bench swap", "1 of 1 results"):
        assert text in done.output
    (root / "empty").mkdir()
    assert runner.invoke(app, ["stale", str(root / "empty")]).exit_code == 2


CHECK = stale.check


def test_every_kind_of_result_names_code_that_exists():
    for kind in KINDS:
        assert paths_of(kind.name), kind.name
    missing = {
        p for paths in MEASURED.values() for p in paths if not (ROOT / p.removeprefix("!")).exists()
    }
    assert not missing
    assert set(measured("accuracy pilot")["files"]) < set(measured("accuracy")["files"])
