"""Checks by a repetition of the first steps that committed accuracy results hold for today's code.

A change of the code around a codec makes the results older than the code. The check repeats the
first training steps under every policy. If their losses have the same bits, the codecs still give
the same values, and the results are valid. The file then names today's commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.progress import track

from bench.accuracy.tasks import make
from cswap.errors import ConfigError
from cswap.experiments.accuracy.train import repeatable, train
from cswap.experiments.files.environment import environment
from cswap.experiments.files.writing import write
from cswap.report.terminal import literal
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

STEPS: Final = 12
"""Number of repeated steps of each model's first seed. The guard's first check is in the second."""


def command(file: Path, console: Console) -> None:
    """Repeat the first steps of a result file; write today's commit to it if all bits agree.

    Raises:
        ConfigError: the file holds no finished results, or the losses differ.
    """
    document = read_object(file, "file")
    settings = document.get("settings", {})
    if settings.get("quick") or not document.get("complete"):
        raise ConfigError(f"--confirm: {file} holds no finished results.")
    for model in track(settings["models"], "Repeating", console=console):
        different = _different(document, model)
        if different:
            raise ConfigError(
                f"--confirm: {model}: losses under {', '.join(different)} have other bits now. "
                "Measure again: python -m bench accuracy --again."
            )
    now = environment()
    document["environment"]["confirmed"] = {
        "steps": STEPS,
        **{key: now[key] for key in ("cswap_commit", "cswap_modified", "command", "started")},
    }
    write(file, document)
    console.print(literal(f"Losses of {STEPS} steps have the same bits. Confirmed: {file}"))


def _different(document: dict[str, Any], model: str) -> list[str]:
    # Policies whose first losses differ from the file's.
    settings = document["settings"]
    task = make(model, n_steps=settings["steps"])
    with repeatable():
        replicas = train(task, settings["policies"], 0, lambda: None, most_steps=STEPS)
    stored = {
        run["policy"]: run["losses"][:STEPS]
        for run in document["runs"]
        if run["model"] == model and run["seed"] == 0
    }
    return [p for p, replica in replicas.items() if replica.finish().losses != stored[p]]
