"""`cswap bench report DIR`: pages that need nothing else; and the committed files' form."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")  # the accuracy report's module imports scipy with it

from typer.testing import CliRunner

from cswap.cli import app
from cswap.experiments import results_page
from cswap.experiments.files.reading import ResultFileError, load
from cswap.experiments.results_page import tables_of

RESULTS = Path(__file__).parents[2] / "bench" / "results"
COMMITTED = sorted(RESULTS.rglob("*.json"))
WIDTH, HEIGHT = 1000, 1400

ENVIRONMENT = {
    *("cpu", "n_cpus", "torch_threads", "load_average_before", "python", "versions"),
    *("cswap_commit", "cswap_modified", "command", "started"),
}


def name_of(path):
    return path.relative_to(RESULTS).as_posix()


@pytest.mark.parametrize("path", COMMITTED, ids=name_of)
def test_committed_results_say_their_version_and_where_they_were_made(path):
    document = load(path)
    assert isinstance(document["version"], int)
    assert document["version"] >= 1
    assert set(document["environment"]) >= ENVIRONMENT
    assert document["environment"]["command"].startswith("python -m bench ")
    assert re.fullmatch("[0-9a-f]{40}", document["environment"]["cswap_commit"])
    assert document.get("complete", True) is True
    assert "done" not in document  # an unfinished run's


@pytest.mark.parametrize("path", COMMITTED, ids=name_of)
def test_committed_results_have_a_table_and_name_the_kind_that_their_command_makes(path):
    document = load(path)
    command, kind = document["environment"]["command"], document["kind"].split()
    assert any(command.startswith(f"python -m bench {word}") for word in (kind[0], kind[-1]))
    assert any(grid.rows for grid in tables_of(document))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "has no 'environment'"),
        ('{"environment": {}, "kind": "swap"}', "has no rows"),
        ('{"environment": {}, "kind": "accuracy"}', "lacks something"),
    ],
)
def test_what_is_no_result_file_says_why(content, said, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ResultFileError, match=r"a\.json: left out: ") as caught:
        results_page.sections(tmp_path)
    assert said in str(caught.value)


class Page(HTMLParser):
    """Takes down what a page refers to, and that its elements are closed."""

    VOID = frozenset({"meta", "img", "br", "link", "hr", "input"})

    def __init__(self, text):
        super().__init__()
        self.references, self.images, self.ids, self.open, self.headings = [], [], set(), [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.add(found.get("id"))
        for name in ("src", "href", "data", "action", "srcset", "poster"):
            if name in found:
                (self.images if tag == "img" else self.references).append(found[name])
        assert tag not in {"script", "link", "iframe", "object", "embed"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in {"h1", "h2", "h3"}:
            self.headings.append(data)


def check(text):
    """Fail unless the page needs nothing but itself; return it parsed."""
    from PIL import Image

    page = Page(text)
    assert not page.open
    for reference in page.references:
        assert reference.startswith("#"), reference
        assert reference[1:] in page.ids
    for source in page.images:
        head, _, data = source.partition(",")
        assert head == "data:image/png;base64"
        import io

        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
            image.load()
            assert min(image.size) > 100
    assert not re.search(r"url\(|@import", text)
    return page


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report on the committed results, and a file that is none."""
    folder = tmp_path_factory.mktemp("results")
    shutil.copytree(RESULTS / "cpu", folder / "cpu")
    (folder / "notes.json").write_text('{"a": 1}')
    (folder / "swap.partial.json").write_text("{}")
    result = CliRunner().invoke(app, ["bench", "report", str(folder)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "notes.json: left out" in result.output
    assert "swap.partial.json: left out: unfinished" in result.output
    return folder


def test_the_page_has_every_file_and_needs_nothing_else(report):
    page = check((report / "report.html").read_text(encoding="utf-8"))
    for path in COMMITTED:
        if name_of(path).startswith("cpu/"):
            assert name_of(path) in page.headings
    assert len(page.images) == len(list((report / "cpu").rglob("*.png")))


def test_any_result_has_a_table_of_its_figures(tmp_path):
    row = {"way": "to the host", "blocks": 0, "nbytes": 2**20, "gb_per_s": 50.25}
    environment = load(COMMITTED[0])["environment"] | {"gpu": {"name": "Some GPU"}}
    document = {"kind": "gpu link", "version": 1, "environment": environment, "rows": [row]}
    (tmp_path / "link.json").write_text(json.dumps(document))
    result = CliRunner().invoke(
        app, ["bench", "report", str(tmp_path), "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out" / "report.html").read_text()
    check(text)
    assert "Some GPU; " in text
    assert "<td>to the host</td><td>0</td><td>1048576</td><td>50.25</td>" in text


def test_text_of_results_is_no_markup():
    from cswap.experiments.grid import Grid
    from cswap.experiments.html_page import Section, render

    text = render("a & b", [Section("<i>", "<b>", [Grid(["<script>"], [["<img src=x>"]])])])
    assert "<script>" not in text
    assert "<img" not in text
    check(text)


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_a_folder_without_results_is_refused(what, tmp_path):
    folder = tmp_path / "results"
    if what == "empty":
        folder.mkdir()
    with pytest.raises(ResultFileError) as caught:
        results_page.write(folder)
    assert len(str(caught.value).splitlines()) == 1
    assert str(folder) in str(caught.value)


def browser():
    """Path of a Chromium, or None: on the path, or among playwright's."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    for name in (*names, "chrome-headless-shell", "headless_shell", "microsoft-edge"):
        if found := shutil.which(name):
            return found
    places = (os.environ.get("PLAYWRIGHT_BROWSERS_PATH"), Path.home() / ".cache" / "ms-playwright")
    for place in places:
        for pattern in ("chromium-*/*/chrome", "chromium_headless_shell-*/*/*headless*shell"):
            for path in sorted(Path(place).glob(pattern)) if place else ():
                if os.access(path, os.X_OK):
                    return str(path)
    return None


def screenshot(page, out, home):
    command = [
        browser() or "",
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", "--hide-scrollbars", f"--user-data-dir={home}"),
        "--host-resolver-rules=MAP * ~NOTFOUND",  # no name has an address: there is no network
        *(f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=5000"),
        *(f"--screenshot={out}", page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert out.exists(), done.stderr[-2000:]


@pytest.mark.skipif(browser() is None, reason="no chromium, chrome or playwright browser is found")
def test_a_browser_without_network_shows_it(report, tmp_path):
    import numpy as np
    from PIL import Image

    page = report / "report.html"
    out = tmp_path / "shot.png"
    screenshot(page, out, tmp_path / "profile")
    with Image.open(out) as image:
        assert image.size == (WIDTH, HEIGHT)
        pixels = np.asarray(image.convert("L")).astype(int)
    dark = pixels < 128
    # From top to bottom, and to the right of the middle: neither blank nor an error's few lines.
    assert 0.005 < dark.mean() < 0.5
    assert sum(band.any() for band in np.array_split(dark, 10, axis=0)) >= 9
    assert dark[:, WIDTH // 2 :].any()
