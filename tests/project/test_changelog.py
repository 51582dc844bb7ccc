"""CHANGELOG.md keeps the form of keepachangelog.com and agrees with the version."""

from __future__ import annotations

import re
from pathlib import Path

import cswap

TEXT = (Path(__file__).resolve().parents[2] / "CHANGELOG.md").read_text("utf-8")
VERSIONS = re.findall(r"^## \[(.+?)\](.*)$", TEXT, re.MULTILINE)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_unreleased_comes_first():
    assert VERSIONS[0] == ("Unreleased", "")


def test_newest_release_is_the_package_version():
    released = [version for version, _ in VERSIONS[1:]]
    # Between releases the version is a .dev of the next one, which is not listed yet.
    if ".dev" in cswap.__version__:
        assert cswap.__version__.partition(".dev")[0] not in released
    else:
        assert released[0] == cswap.__version__


def test_releases_are_dated_newest_first():
    dates = [rest for _, rest in VERSIONS[1:]]
    assert all(re.fullmatch(r" - \d{4}-\d{2}-\d{2}", date) for date in dates)
    assert dates == sorted(dates, reverse=True)


def test_sections_are_of_the_known_kinds():
    sections = re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
    assert sections
    assert set(sections) <= KINDS
