"""The accuracy experiment as a terminal table, Markdown, pictures and one self-contained page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from bench import page
from bench.accuracy.summary import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLUMNS: Final = (
    *("model", "policy", "val. loss", "change (95 % CI)", "accuracy", "verdict"),
    *("bits", "MiB held", "codecs ms", f"swap latency on {GPUS[0]}*"),
)
NOTE: Final = (
    "Change: paired over matched seeds, against off. Verdict: the worst pair against off's spread "
    "over the seeds. MiB held: of all tensors that could be swapped, in one step. Codecs: measured "
    "on this CPU. * Simulated: encode, copies and decode of a step's tensors with nothing hidden, "
    "against raw copies."
)
COLOURS: Final = {
    "lossless": "#0072b2",
    "bf16": "#56b4e9",
    "int8": "#009e73",
    "fp8": "#e69f00",
    "int4": "#d55e00",
}
MARKERS: Final = {"cnn": "o", "vit": "s", "gpt": "^"}


def rows(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row per model and policy, of `COLUMNS`."""
    for row in document["summary"]:
        loss, simulated = row["loss"], row["simulated_swap"].get(GPUS[0])
        interval = "" if loss["low"] is None else f" [{loss['low']:+.4f}, {loss['high']:+.4f}]"
        off = row["policy"] == "off"
        yield (
            row["model"],
            row["policy"],
            f"{row['validation_loss']:.4f}",
            "" if off else f"{loss['mean']:+.4f}{interval}",
            f"{100 * row['accuracy']:.1f} %",
            "" if off else loss["verdict"],
            "" if off else "equal" if row["bit_equal"] else "differ",
            f"{row['held_bytes'] / 2**20:.1f}",
            "" if off else f"{row['codec_ms']:.1f}",
            "" if simulated is None else f"-{100 * simulated['reduction']:.0f} %",
        )


def table(document: dict[str, Any]) -> Table:
    """For a terminal."""
    found = Table(*COLUMNS, title="Accuracy against latency", caption=NOTE)
    for row in rows(document):
        found.add_row(*row)
    return found


def markdown(document: dict[str, Any]) -> str:
    """The same for README and docs."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(row) for row in rows(document)]
    return "\n".join(f"| {line} |" for line in lines) + f"\n\n{NOTE}\n"


def write(document: dict[str, Any], out: Path) -> list[Path]:
    """Write table.md, the pictures and report.html into the folder."""
    import matplotlib as mpl

    mpl.use("Agg")
    (out / "table.md").write_text(markdown(document), encoding="utf-8")
    drawn = {}
    for name, draw in (("pareto", _pareto), ("heat", _heat), ("curves", _curves)):
        drawn[name] = out / f"{name}.png"
        draw(document, drawn[name])
    html = out / "report.html"
    html.write_text(_html(document, drawn), encoding="utf-8")
    return [out / "results.json", out / "table.md", *drawn.values(), html]


_SHOWN: Final = {
    "pareto": (
        "What it costs and what it buys",
        "change of validation loss against reduction of swap latency",
    ),
    "heat": (
        "Error of gradients by class of module",
        "relative error of gradients by policy and class of module",
    ),
    "curves": ("Training", "training loss by model and policy"),
}
"""Pictures, their headings, and what they show for who does not see them."""


def _html(document: dict[str, Any], pictures: dict[str, Path]) -> str:
    section = page.Section(
        "",
        page.where(document["environment"]),
        [page.Grid(COLUMNS, list(rows(document)), notes=[NOTE])],
        pictures=[page.Picture(*_SHOWN[name], path) for name, path in pictures.items()],
    )
    return page.render("cswap: accuracy against latency", [section])


def _pareto(document: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for row in document["summary"]:
        simulated = row["simulated_swap"].get(GPUS[0])
        if simulated is None:
            continue
        loss = row["loss"]
        low, high = loss["low"], loss["high"]
        bars = None if low is None else [[loss["mean"] - low], [high - loss["mean"]]]
        axes.errorbar(
            100 * simulated["reduction"],
            loss["mean"],
            yerr=bars,
            fmt=MARKERS.get(row["model"], "o"),
            color=COLOURS.get(row["policy"], "black"),
            capsize=3,
            label=f"{row['model']} {row['policy']}",
        )
    for row in document["summary"]:
        if row["policy"] == "off":
            axes.axhline(row["loss"]["spread"], color="#999999", lw=0.8, ls=":")
    axes.axhline(0.0, color="black", lw=0.8)
    axes.set(
        xlabel=f"swap latency below raw copies, % (simulated, {GPUS[0]})",
        ylabel="change of validation loss, nats\n(95 % CI; dotted: off's seed spreads)",
    )
    axes.legend(fontsize=7, ncols=3)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _heat(document: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    found = document["gradient_errors"]
    figure, panels = plt.subplots(
        1, max(1, len(found)), figsize=(4 * max(1, len(found)), 3.4), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel, (model, by_policy) in zip(panels[0], found.items(), strict=False):
        kinds = sorted({kind for errors in by_policy.values() for kind in errors})
        values = [[max(errors.get(k, 0.0), 1e-8) for k in kinds] for errors in by_policy.values()]
        panel.imshow(values, norm=LogNorm(1e-8, 1.0), cmap="cividis", aspect="auto")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                text = "0" if value <= 1e-8 else f"{value:.1e}"
                ink = "w" if value < 1e-4 else "k"
                panel.text(x, y, text, ha="center", va="center", fontsize=7, color=ink)
        panel.set(title=model, xticks=range(len(kinds)), yticks=range(len(by_policy)))
        panel.set_xticklabels(kinds, rotation=30, ha="right", fontsize=8)
        panel.set_yticklabels(list(by_policy), fontsize=8)
    figure.suptitle("relative error of gradients, ||g - g_off|| / ||g_off||", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _curves(document: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    models = document["settings"]["models"]
    figure, panels = plt.subplots(
        1, len(models), figsize=(4 * len(models), 3.4), squeeze=False, layout="constrained"
    )
    for panel, model in zip(panels[0], models, strict=True):
        for run in document["runs"]:
            if run["model"] == model and run["seed"] == 0:
                colour = COLOURS.get(run["policy"], "#999999")
                width = 3.5 if run["policy"] == "off" else 1.2
                panel.plot(run["losses"], color=colour, lw=width, label=run["policy"])
        panel.set(title=model, xlabel="training step", ylabel="cross entropy, nats")
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
