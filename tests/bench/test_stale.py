"""`python -m bench stale`: results that are older than the code that they measure."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

pytest.importorskip("typer")
if shutil.which("git") is None:
    pytest.skip("needs git", allow_module_level=True)

from typer.testing import CliRunner

from bench.__main__ import app
from bench.files import stale
from bench.files.kinds import KINDS
from bench.files.measured_code import MEASURED, paths_of
from bench.files.stale import code_of
from cswap.experiments.files.environment import ROOT

CODE = '"""A module."""\n\nRATE = 3  # per second\nSLOW = "It takes ten seconds."\n'


def git(root, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = [str(shutil.which("git")), *who, *arguments]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with one package, which results of `swap` measure."""
    monkeypatch.setitem(MEASURED, "swap", ("engine", "!engine/gpu.py"))
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text(CODE)
    (tmp_path / "engine" / "notes.md").write_text("not code")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def result(root, **environment):
    """A result of the code as it is committed."""
    path = root / "result.json"
    about = {"cswap_commit": git(root, "rev-parse", "HEAD"), "command": "python -m bench swap"}
    environment = {**about, **environment}
    path.write_text(json.dumps({"kind": "swap", "environment": environment, "rows": []}))
    return path


def test_a_result_of_the_code_as_it_is_is_not_stale(root):
    found = stale.check(result(root), root)
    assert (found.is_stale, found.changed, found.why) == (False, (), "")
    assert (found.name, found.command) == ("result.json", "python -m bench swap")


@pytest.mark.parametrize(
    ("text", "is_stale"),
    [
        ('"""Another docstring."""\nRATE = (\n    3\n)\nSLOW = "It takes an hour."\n', False),
        (CODE.replace("3", "4"), True),
        (CODE + "RATE = 3\n", True),
        (CODE.replace("It takes ten seconds.", "prmt.b32 a b;"), True),  # another language's code
        ("RATE =", True),
    ],
)
def test_only_code_counts(root, text, is_stale):
    path = result(root)
    (root / "engine" / "a.py").write_text(text)
    assert stale.check(path, root).is_stale is is_stale
    git(root, "commit", "-qam", "second")
    found = stale.check(path, root)
    assert (found.is_stale, found.commits) == (is_stale, int(is_stale))


def test_new_and_removed_files_are_changes(root):
    path = result(root)
    (root / "engine" / "gpu.py").write_text("x = 1\n")  # the measured device never runs it
    (root / "engine" / "b.py").write_text("x = 1\n")
    assert stale.check(path, root).changed == ("engine/b.py",)
    (root / "engine" / "b.py").write_text('"""Only a docstring."""\n')
    assert stale.check(path, root).changed == ()
    (root / "engine" / "a.py").unlink()
    assert stale.check(path, root).changed == ("engine/a.py",)


def test_code_that_was_not_committed_came_with_its_result(root):
    first = git(root, "rev-parse", "HEAD")
    (root / "engine" / "a.py").write_text("RATE = 4\n")
    path = result(root, cswap_modified=True)
    assert "not committed" in stale.check(path, root).why
    git(root, "add", ".")
    git(root, "commit", "-qm", "the result and its code")
    assert not stale.check(path, root).is_stale
    assert stale.check(result(root, cswap_commit=first), root).changed == ("engine/a.py",)
    confirmed = {"cswap_commit": git(root, "rev-parse", "HEAD"), "cswap_modified": False}
    assert not stale.check(result(root, cswap_commit=first, confirmed=confirmed), root).is_stale


def test_a_commit_that_is_not_known_cannot_be_compared(root):
    assert "commit is not known" in stale.check(result(root, cswap_commit="0" * 40), root).why


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = f'{a} # {b}'  # c", "x = f'{a} # {b}'"),
        ('def f():\n    """Doc."""\n    return 1', "def f():\n\n    return 1"),
    ],
)
def test_layout_does_not_count(one, other):
    assert code_of("a.py", one + "\n") == code_of("b.py", other + "\n")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 'a'", "x = 'b'"),
        ("x = f'{a}'", "x = f'{b}'"),
        ("if a:\n    f()\ng()", "if a:\n    f()\n    g()"),
    ],
)
def test_code_counts(one, other):
    assert code_of("a.py", one + "\n") != code_of("a.py", other + "\n")


def test_data_files_count_as_they_are():
    assert code_of("a.json", "{}") != code_of("a.json", "{ }")


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
    named = {path.removeprefix("!") for paths in MEASURED.values() for path in paths}
    assert not [path for path in named if not (ROOT / path).exists()]
