"""Selectors of modules: as fnmatch would have it, however many there are."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cswap.errors import ConfigError
from cswap.selectors import MOST_CHARACTERS, MOST_GLOBS, MOST_LENGTH, Globs, Selectors, check_globs

TEXTS = st.text("ab.*?[]!-\n", max_size=6)


@given(st.lists(TEXTS, max_size=6), TEXTS)
def test_the_first_glob_that_fnmatch_finds(globs, path):
    expected = next((glob for glob in globs if fnmatchcase(path, glob)), None)
    assert Globs(globs).first(path) == expected
    assert Selectors(globs).matches(path, None) == (expected is not None)


def test_classes_select_their_instances():
    chosen = Selectors((int, "head.*"))
    assert [chosen.matches(path, 1.0) for path in ("head.0", "body")] == [True, False]
    assert [chosen.matches("body", value) for value in (True, 2, "2")] == [True, True, False]
    assert [bool(Selectors(found)) for found in ((), (int,), ("x",))] == [False, True, True]


@pytest.mark.timeout(60)
def test_a_hundred_thousand_paths_are_looked_up():
    chosen = Selectors([f"layer.{i}" for i in range(100_000)])
    assert sum(chosen.matches(f"layer.{i}", None) for i in range(0, 200_000, 2)) == 50_000


@pytest.mark.timeout(60)
def test_the_most_that_is_allowed_is_compiled():
    longest = "*[" * (MOST_LENGTH // 2)
    globs = [longest[:-1] + str(i % 10) + "?" * (i // 10) for i in range(50)]
    allowed = [glob[:MOST_LENGTH] for glob in globs]
    check_globs(allowed, "exclude")
    assert Globs(allowed).first("x" * 1000) is None


@pytest.mark.parametrize(
    "globs",
    [
        ["*" * (MOST_LENGTH + 1)],
        ["*"] * (MOST_GLOBS + 1),
        ["*" * MOST_LENGTH] * (MOST_CHARACTERS // MOST_LENGTH + 1),
    ],
    ids=["long", "many", "many long"],
)
def test_more_is_refused(globs):
    with pytest.raises(ConfigError, match="exclude"):
        check_globs(globs, "exclude")


def test_paths_may_be_many_and_long():
    check_globs(["x" * 10_000] * 10_000, "exclude")
