"""The fingerprint of measured code: what counts as code, and what does not."""

from __future__ import annotations

import pytest

from cswap.experiments.files.kinds import FILES
from cswap.experiments.files.measured_code import (
    MEASURED,
    ROOT,
    digest,
    fingerprint,
    measured,
    paths_of,
)


def test_new_and_removed_files_are_changes(tmp_path):
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "a.py").write_text("RATE = 3\n")
    (folder / "notes.md").write_text("not code")
    before = fingerprint(["engine"], tmp_path)
    assert list(before) == ["engine/a.py"]
    (folder / "b.py").write_text('"""Only a docstring."""\n')
    assert fingerprint(["engine"], tmp_path) == before
    (folder / "b.py").write_text("x = 1\n")
    assert fingerprint(["engine"], tmp_path).keys() == {*before, "engine/b.py"}
    assert fingerprint(["engine", "!engine/b.py"], tmp_path) == before
    (folder / "a.py").unlink()
    assert fingerprint(["engine"], tmp_path).keys() == {"engine/b.py"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", '"""A docstring."""\nx = 1  # a comment'),
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
        ("x = 3", "x = (\n    3\n)"),  # brackets are tokens of the code
        ("x = 3", "x = 3\nx = 3"),
        ("x = 'a'", "x = 'b'"),
        ("x = f'{a}'", "x = f'{b}'"),
        ("if a:\n    f()\ng()", "if a:\n    f()\n    g()"),
    ],
)
def test_code_counts(one, other):
    assert digest("a.py", one + "\n") != digest("a.py", other + "\n")


def test_data_files_count_as_they_are():
    assert digest("a.json", "{}") != digest("a.json", "{ }")


def test_every_kind_of_result_names_code_that_exists():
    for kind in FILES:
        assert paths_of(kind), kind
    missing = {
        p for paths in MEASURED.values() for p in paths if not (ROOT / p.removeprefix("!")).exists()
    }
    assert not missing
    assert set(measured("accuracy pilot")["files"]) < set(measured("accuracy")["files"])
