"""The figures in README.md and docs are those of the committed result files."""

from __future__ import annotations

import pytest

readme = pytest.importorskip("bench.readme", reason="run from the repository's root")


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda p: p.name)
def test_tables_are_made_from_the_committed_results(page):
    text = page.read_text()
    assert readme.filled(text) == text


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda p: p.name)
def test_every_table_of_a_page_is_known(page):
    import re

    names = set(re.findall(r"<!-- ([a-z ]+) -->", page.read_text()))
    assert names
    assert names <= set(readme.TABLES)
