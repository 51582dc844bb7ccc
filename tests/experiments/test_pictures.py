"""Pictures: ticks and words that do not print over each other, and one palette."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from bench.codecs import plots as bench_plots
from cswap import palette
from cswap.experiments.codecs import plots
from cswap.experiments.labels import place
from cswap.report.figure import new_figure
from cswap.report.log_axis import plain_ticks

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "cpu"


def overlapping(texts, renderer):
    """Pairs of words that share pixels."""
    from matplotlib.text import Text

    boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in texts]
    shown = [(word, box) for word, box in boxes if word]
    return [
        (one, other)
        for (one, a), (other, b) in combinations(shown, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
    ]


def tick_labels(axis):
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    labels = [tick.label1 for tick in ticks if low <= tick.get_loc() <= high]
    return [label for label in labels if label.get_visible()]  # panels may share an axis


def check(figure, dpi=120):
    """Draw, as `png_of` does; fail if ticks or annotations of a panel overlap."""
    from matplotlib.text import Annotation

    figure.set_dpi(dpi)
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    for panel in figure.axes:
        for axis in (panel.xaxis, panel.yaxis):
            assert overlapping(tick_labels(axis), renderer) == [], panel.get_title()
        words = [child for child in panel.get_children() if isinstance(child, Annotation)]
        assert overlapping(words, renderer) == [], panel.get_title()


LIMITS = [(0.2, 7.5), (0.3, 6.0), (0.95, 3.3), (1.1, 1.7), (0.9, 1.2), (0.01, 9.0), (1e-3, 1e6)]


@pytest.mark.parametrize("limits", LIMITS)
def test_ticks_of_logarithmic_axes_do_not_overlap(limits):
    figure = new_figure(5.5, 3.9)
    panel = figure.subplots()
    panel.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
    plain_ticks(panel.xaxis)
    plain_ticks(panel.yaxis)
    check(figure)
    low, high = limits
    assert 2 <= sum(low <= tick <= high for tick in panel.xaxis.get_majorticklocs()) <= 10
    assert not panel.xaxis.get_minor_ticks()
    figure.canvas.draw()
    assert not any("times" in label.get_text() for label in tick_labels(panel.xaxis))


def test_words_of_near_points_do_not_overlap():
    figure = new_figure(5.5, 3.9)
    panel = figure.subplots()
    labels = [(5 + 0.02 * i, 1.0 + 0.01 * (i % 2), f"zvc+codec{i}") for i in range(9)]
    panel.plot([x for x, *_ in labels], [y for _, y, _ in labels], "o", label="codecs")
    panel.set(xlim=(0, 5.3), ylim=(0.5, 1.5))
    figure.draw_without_rendering()
    place(panel, labels)
    check(figure, dpi=figure.dpi)
    frame = panel.get_window_extent()
    from matplotlib.text import Text

    for text in panel.texts:  # beside the frame, and not above or below it
        box = Text.get_window_extent(text)
        assert box.x0 > frame.x1
        assert frame.y0 < (box.y0 + box.y1) / 2 < frame.y1 + 1


def drawn(monkeypatch):
    """Figures instead of files."""
    figures = []

    def keep(figure):
        figures.append(figure)
        return b""

    import bench.advisor.report
    import bench.drawing.steps
    import bench.twin.report
    import cswap.experiments.accuracy.pictures

    for module in (
        *(plots, bench.advisor.report, bench.drawing.steps, bench.twin.report),
        cswap.experiments.accuracy.pictures,
    ):
        monkeypatch.setattr(module, "png_of", keep)
    return figures


@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param(("float32",), id="float32", marks=pytest.mark.slow),
        pytest.param(("float32", "bfloat16"), id="all", marks=pytest.mark.slow),
    ],
)
def test_pictures_of_the_committed_results_are_legible(tmp_path, monkeypatch, dtypes):
    import bench.advisor.report
    import bench.swap.report
    from cswap.experiments.accuracy.pictures import pareto

    figures, sparsity = drawn(monkeypatch), bench_plots._sparsity

    def of_chosen(document, dtype):  # words of a picture take seconds to place
        return sparsity(document, dtype) if dtype in dtypes else None

    monkeypatch.setattr(bench_plots, "_sparsity", of_chosen)

    def result(name):
        return json.loads((RESULTS / name).read_text())

    n_codecs = len(bench_plots.draw(result("codecs.json"), tmp_path, "codecs"))
    bench.advisor.report.draw(result("advisor.json")["cells"], tmp_path / "advisor.png")
    bench.swap.report.draw(result("swap.json"), tmp_path / "swap.png")
    pareto(result("accuracy/results.json"), tmp_path / "pareto.png")
    assert len(figures) == n_codecs + 3
    for figure in figures:
        check(figure)


TWIN = sorted((ROOT / "bench" / "results" / "twin").glob("*.png"))


@pytest.mark.parametrize("drawing", TWIN, ids=lambda path: path.stem)
def test_pictures_of_the_twin_are_legible_on_a_telephone(tmp_path, monkeypatch, drawing):
    import bench.twin.report

    figures = drawn(monkeypatch)
    document = json.loads(drawing.with_suffix(".json").read_text())
    bench.twin.report.draw(document, tmp_path / "twin.png")
    (figure,) = figures
    check(figure)
    for panel, model in zip(figure.axes, document["optimum"], strict=True):
        words = [row["method"] for row in document["rows"] if row["model"] == model]
        assert len(panel.texts) == len(words)
    check_on_a_telephone(figure)


def check_on_a_telephone(figure):
    """Words of at least 10 pixels' size, where the picture is 390 pixels wide."""
    from matplotlib.text import Text

    pixels = 390 / figure.get_figwidth()  # of an inch
    words = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in words) / 72 * pixels >= 10


def test_the_first_picture_is_legible_on_a_telephone(tmp_path, monkeypatch):
    from bench.pages import first_picture

    figures = []

    def keep(figure, *_):
        figures.append(figure)
        return b""

    monkeypatch.setattr(first_picture, "image_of", keep)
    first_picture.draw(tmp_path / "fit.png")
    (figure,) = figures
    check(figure)
    check_on_a_telephone(figure)
    cpu, gpu = figure.axes
    assert "measured" in cpu.get_title()
    assert "simulated" in gpu.get_title()


def test_colours_stand_in_one_file():
    own = ROOT / "cswap" / "palette.py"
    for folder in ("cswap", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            found = re.findall(r"""["']#[0-9a-fA-F]{6}["']""", path.read_text("utf-8"))
            assert path == own or not found, path
    names = [name for name in vars(palette) if name.isupper()]
    colours = [getattr(palette, name) for name in names]
    assert len(set(colours)) == len(colours)
