"""The pages build without a warning; what they name exists; their programs run."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest

import cswap
from cswap.advisor.advisor import CHEAPEST, EARLY
from cswap.advisor.live_costs import HYSTERESIS, MARGIN
from cswap.codecs import registry
from cswap.fit.explained import WHYS
from cswap.install_hint import to_install
from cswap.stats.keep_reasons import REASONS, Reason
from cswap.stats.stats import Stats

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]

STYLES = "stylesheets/code.css"

named = pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))


def code_blocks(path, language="python"):
    text = path.read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def spans(path):
    """What stands in code: blocks without a language, indented ones, and spans in backticks."""
    text = path.read_text("utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE)
    return [*lines, *(s.replace("\n", " ") for s in re.findall(r"`([^`]+)`", prose))]


# The web pages.


@pytest.fixture
def site(tmp_path):
    """A copy to build in, and the command that does it."""
    pytest.importorskip("zensical", reason="pip install '.[docs]'")
    pytest.importorskip("mkdocstrings_handlers.python", reason="pip install '.[docs]'")
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in ("cswap", "kernels"):
        (tmp_path / name).symlink_to(ROOT / name)

    def build():
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return tmp_path, build


@pytest.mark.slow
def test_the_pages_build_without_a_warning(site):
    folder, build = site
    done = build()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    api = (folder / "site" / "api" / "index.html").read_text("utf-8")
    for name, module in cswap._EXPORTS.items():
        assert f'id="{module}.{name}"' in api
    measured = (folder / "site" / "benchmarks" / "index.html").read_text("utf-8")
    assert re.search(r"<details>\s*<summary>[^<]+</summary>\s*<table>", measured)
    assert "<p>|" not in measured  # a folded table that was not read as one
    assert "content.code.copy" in measured
    assert measured.count('name="__palette"') == 3  # light, dark, as the system
    # Our rules for code come after the theme's, which break it at any letter.
    sheets = re.findall(r'<link rel="stylesheet" href="([^"]+)"', measured)
    assert sheets[-1] == f"../{STYLES}"
    theme = "".join(path.read_text("utf-8") for path in (folder / "site").rglob("main.*.css"))
    assert re.search(r"\.md-typeset code\{[^}]*word-break:break-word", theme)
    ours = (folder / "site" / STYLES).read_text("utf-8")
    assert re.search(r"\.md-typeset code \{\s*word-break: normal;", ours)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["[x](no-such-page.md)", "[x](#no-such-part)", "::: cswap.no"])
def test_a_mistake_in_a_page_stops_the_build(site, mistake):
    folder, build = site
    with (folder / "docs" / "limits.md").open("a") as page:
        page.write(f"\n{mistake}\n")
    assert build().returncode != 0


def test_every_page_is_in_the_navigation():
    def files(entry):
        if isinstance(entry, str):
            return [entry]
        return [f for e in (entry.values() if isinstance(entry, dict) else entry) for f in files(e)]

    yaml = pytest.importorskip("yaml")
    nav = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(nav) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
    overview = (DOCS / "index.md").read_text("utf-8")
    top = {str(p.relative_to(DOCS)) for p in PAGES if p.parent == DOCS} - {"index.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", overview)) == top


def test_the_site_has_rules_for_the_width_of_a_phone():
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["extra_css"] == [STYLES]
    rules = (DOCS / STYLES).read_text("utf-8")
    assert re.search(r"^\.md-typeset code \{\n  word-break: normal;", rules, re.MULTILINE)
    table = r"^\.md-typeset table code \{\n  overflow-wrap: normal;"
    assert re.search(table, rules, re.MULTILINE)


# How cswap is installed.


def test_pages_install_from_a_checkout_and_say_it_in_one_way():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = map(to_install, project["optional-dependencies"])
    ways = {"pip install .", *(way.partition(" in a ")[0] for way in extras)}
    commands = {
        (path.name, re.split(r"\s+#", span)[0])
        for path in TEXTS
        for span in spans(path)
        if span.startswith("pip install ")
    }
    assert {one for one in commands if one[1] not in ways} == {
        ("getting-started.md", 'pip install "cswap[host] @ git+URL"'),
        ("add-a-codec.md", "pip install hypothesis"),
    }
    assert "`URL` is a placeholder" in (DOCS / "getting-started.md").read_text("utf-8")
    first = code_blocks(ROOT / "README.md", "")[0]
    assert first.startswith("pip install . ")
    assert code_blocks(DOCS / "index.md", "")[0] == first


def test_the_size_of_an_installation_is_the_recorded_one():
    text = " ".join((DOCS / "getting-started.md").read_text("utf-8").split())
    found = json.loads((DOCS / "installed-sizes.json").read_text("utf-8"))
    assert found["command"] == " ".join(["du -sm", *found["mib"]])
    mib = {name: found["mib"][name] + found["mib"].get(f"{name}.libs", 0) for name in found["mib"]}
    assert (
        f"takes {mib['llvmlite']} MiB for llvmlite, {mib['numba']} for Numba, {mib['scipy']} for "
        f"scipy and {mib['numpy']} for NumPy" in text
    )


# What pages name exists.


@named
def test_linked_files_exist(path):
    text = path.read_text("utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    for target in [*targets, *re.findall(r'<img src="([^"]+)"', text)]:
        if "://" not in target:
            assert (path.parent / target).exists(), target


@named
def test_files_of_the_repository_that_are_named_exist(path):
    made = (ROOT / ".gitignore").read_text("utf-8").split()  # by commands, on some machines
    known = {p.name for p in ROOT.iterdir()} - {name.rstrip("/") for name in made}
    for span in spans(path):
        for word in re.findall(r"(?<![\w/.~-])(?:[\w.-]+/)+[\w.-]*", span):
            placeholder = any(mark in span for mark in ("…", "<", "test_x"))
            if word.split("/")[0] in known and not placeholder:
                assert (ROOT / word).exists(), f"{word} in {span!r}"


@named
def test_commands_that_are_named_exist(path):
    pytest.importorskip("typer")
    from bench.__main__ import COMMANDS
    from cswap.commands.experiments import COMMANDS as OWN

    for span in spans(path):
        assert set(re.findall(r"python3? -m bench ([a-z]+)", span)) <= set(COMMANDS), span
        assert set(re.findall(r"cswap bench ([a-z]+)", span)) <= set(OWN), span
        for target in re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)", span):
            text = (ROOT / "Makefile").read_text("utf-8")
            assert re.search(rf"^{target}:", text, re.MULTILINE), span
        found = re.match(r"(?:\S*/)?cswap ((?:[a-z-]+ ?)+)", span)
        if found and not span.startswith("cswap off"):
            check_command(span.split("#")[0].split("`")[0].split()[1:], span)


def check_command(words, span):
    import typer

    from cswap import cli

    command: Any = typer.main.get_command(cli.app)
    while hasattr(command, "commands") and words and not words[0].startswith("--"):
        assert words[0] in command.list_commands(None), span
        command, words = command.get_command(None, words[0]), words[1:]
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    words = words[: words.index("--")] if "--" in words else words  # the rest is a script's
    assert {w for w in words if w.startswith("--")} <= {*options, "--help"}, span


def test_contributing_has_the_layers_that_are_checked():
    rules = ConfigParser()
    rules.read(ROOT / ".importlinter")
    checked = rules["importlinter:contract:layers"]["layers"].split("\n")
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    block = re.search(r"^    cli > .*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    written = block[0].split(">")
    assert [sorted(re.findall(r"\w+", layer)) for layer in written] == [
        sorted(re.findall(r"\w+", layer)) for layer in checked if layer
    ]


def test_the_api_page_has_every_public_name_once():
    entries = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text("utf-8"), re.MULTILINE)
    assert len(entries) == len(set(entries))
    for name, module in cswap._EXPORTS.items():
        assert f"{module}.{name}" in entries or module in entries, name
    assert "cswap.plan.planner.plan" in entries
    import cswap.testing as public

    modules = {getattr(public, name).__module__ + "." + name for name in public.__all__}
    assert modules <= set(entries)


# Troubleshooting is complete.


def test_every_reason_has_its_part():
    text = (DOCS / "troubleshooting.md").read_text("utf-8")
    part = text.split("## Reasons, one by one")[1].split("\n## ")[0]
    found = re.findall(r"^### (.+)\n\n(.+)", part, re.MULTILINE)
    assert {name for name, _ in found} == set(REASONS)
    assert all(isinstance(REASONS[name], Reason) and len(words) > 20 for name, words in found)


def test_every_fallback_and_every_reason_of_a_choice_is_explained():
    text = (DOCS / "troubleshooting.md").read_text("utf-8")
    sources = "\n".join(p.read_text("utf-8") for p in (ROOT / "cswap/engine").rglob("*.py"))
    for name in re.findall(r'fall_back\(\s*f?"([a-z_:{}.]+)"', sources):
        assert re.sub(r"\{.*\}", "CODEC", name) in text
    assert EARLY in text
    assert f"nothing pays by {MARGIN:.0%} " in text
    assert f"no other is cheaper by {HYSTERESIS:.0%} " in text
    assert CHEAPEST in text
    for reason in WHYS:
        assert f"| {reason} |" in text


def test_every_figure_of_stats_is_explained():
    text = (DOCS / "getting-started.md").read_text("utf-8")
    for name in Stats.__dataclass_fields__:
        prefix = name.split("_")[0]
        known = {"kept": "kept: …", "by": "codec …", "guard": "guard…", "fallbacks": "fallback: …"}
        listed = ("device_bytes", "host_bytes", "disk_bytes", "host_is_device")
        assert name in listed or known.get(prefix, name) in text, name


def test_errors_of_lossy_codecs_in_the_table_are_those_that_they_declare():
    rows = re.findall(
        r"^\| `(\w+)` \| ([\d.]+) % \|", (DOCS / "lossy.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 4
    for name, percent in rows:
        digits = len(percent.partition(".")[2])
        error = cswap.get_codec(name).traits.relative_error
        assert error is not None
        assert abs(float(percent) - 100 * error) <= 0.51 * 10**-digits


# Programs in pages run, and are what they say they are.


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def forget_codecs(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_made", {})


@pytest.fixture
def run_page(monkeypatch, tmp_path, forget_codecs):
    """Run a page's programs one after another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(DOCS / "examples")

    def run(name):
        names = {"__name__": "page"}
        for block in code_blocks(DOCS / name):
            exec(compile(block, name, "exec"), names)
        return names

    yield run
    sys.modules.pop("copies", None)


def test_getting_started_runs(run_page, capsys):
    names = run_page("getting-started.md")
    assert names["handle"].stats.swapped > 0
    assert len(names["curve"].points) > 2
    assert "kept: parameter" in capsys.readouterr().out
    assert Path("stats.json").is_file()
    assert Path("step.json").is_file()


def test_which_should_i_use_runs(run_page, capsys):
    import torch

    names = run_page("which.md")
    model, moved = names["model"], names["offloaded"]
    plain = names["Model"]()
    plain.load_state_dict(model.state_dict())
    plain(names["x"]).square().mean().backward()
    for ours, theirs, p in zip(*(m.parameters() for m in (model, moved, plain)), strict=True):
        assert torch.equal(ours.grad, p.grad)
        assert torch.equal(theirs.grad, p.grad)
    stats = names["handle"].stats
    assert stats.packed == stats.swapped == len(plain.blocks)  # the inputs alone
    assert "codec raw" in capsys.readouterr().out


def test_planning_runs(run_page):
    names = run_page("planning.md")
    assert 0 < names["plan"].predicted["peak_bytes"] <= 200 << 20
    codecs = [decision.codec for decision in names["zvc"].decisions.values()]
    stats = names["handle"].stats
    assert codecs == ["zvc"] * 2
    assert stats.swapped == 2
    assert stats.by_codec["zvc"].count == 2
    assert stats.fallbacks == 0


def test_the_codec_of_the_page_is_the_tested_file_and_short():
    page, file = DOCS / "add-a-codec.md", DOCS / "examples" / "copies.py"
    assert code_blocks(page)[0] == file.read_text("utf-8")
    assert len(file.read_text("utf-8").splitlines()) <= 60


@pytest.mark.slow
def test_adding_a_codec_runs(run_page):
    names = run_page("add-a-codec.md")  # check_codec, and a step with bit-equal gradients
    stats = names["handle"].stats.by_codec["copies"]
    assert stats.count == 3
    assert stats.raw == 3 * 6 * 8 * 64 * 64  # bools, of 6 sequences and 8 heads
    assert stats.encoded == 3 * (8 + 64 * 64)
    assert "filled" in {c.codec for c in names["decision"].candidates}


@pytest.mark.usefixtures("forget_codecs")
def test_the_codec_is_found_by_its_entry_point(monkeypatch, tmp_path):
    shutil.copy(DOCS / "examples" / "copies.py", tmp_path / "my_copies.py")
    (entry,) = re.findall(
        r"^(copies = .+)$", "".join(code_blocks(DOCS / "add-a-codec.md", "toml")), re.M
    )
    info = tmp_path / "my_copies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-copies\nVersion: 1.0\n")
    points = f"[cswap.codecs]\n{entry}\n".replace('"', "").replace("mypackage.copies", "my_copies")
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    registry._entry_points.cache_clear()
    try:
        assert "copies" in cswap.list_codecs()
        assert cswap.get_codec("copies").lossless
    finally:
        registry._entry_points.cache_clear()
        sys.modules.pop("my_copies", None)


@pytest.mark.usefixtures("forget_codecs")
def test_copies_finds_pieces_and_leaves_the_rest():
    import torch

    copies = load(DOCS / "examples" / "copies.py").Copies()
    cswap.register_codec("copies", lambda: copies)
    for count, piece in ((24, 50), (1, 50), (4096, 1), (2 * 4096, 1), (15, 7)):
        x = torch.randn(piece).repeat(count)
        nbytes = 8 + 4 * piece * max(1, count // 4096)
        assert copies.encode(x).nbytes == nbytes
        assert torch.equal(copies.decode(copies.encode(x)), x)
