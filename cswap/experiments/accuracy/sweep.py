"""Trains every model from every seed under all policies; finished seeds are in the document."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cswap.experiments.accuracy.choices import choices
from cswap.experiments.accuracy.gradients import errors
from cswap.experiments.accuracy.train import repeatable, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from cswap.experiments.launchers import Launcher
    from cswap.experiments.task import Task

    Part = tuple[str, int]
    """A model and a seed."""

    Maker = Callable[[str], Task]
    """Makes the task of a model."""


def sweep(
    document: dict[str, Any],
    maker: Maker,
    launcher: Launcher,
    console: Console,
    save: Callable[[], object],
) -> None:
    """Add to a document each seed that it does not have.

    Args:
        document: as `python -m bench accuracy` writes it, with settings.
        maker: makes the task of a model.
        launcher: runs the seeds.
        console: shows the progress.
        save: called after each seed.
    """
    settings = document["settings"]
    done = {(run["model"], run["seed"]) for run in document["runs"]}
    wanted = [(m, seed) for m in settings["models"] for seed in range(settings["seeds"][m])]
    missing = [part for part in wanted if part not in done]
    bar = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn())
    with Progress(*bar, TimeElapsedColumn(), console=console) as progress:
        for part, found in _results(launcher, maker, settings["policies"], missing, progress):
            _add(document, part, found)
            save()
    _in_order(document, wanted)
    document["complete"] = True


def _in_order(document: dict[str, Any], wanted: Sequence[Part]) -> None:
    # As if the parts had ended in turn, so that every launcher writes the same document.
    place = {part: i for i, part in enumerate(wanted)}
    document["runs"].sort(key=lambda run: place[run["model"], run["seed"]])
    for key in ("models", "choices", "gradient_errors"):
        by_model = document.get(key, {})
        document[key] = {m: by_model[m] for m in document["settings"]["models"] if m in by_model}


def _results(
    launcher: Launcher,
    maker: Maker,
    policies: Sequence[str],
    parts: Sequence[Part],
    progress: Progress,
) -> Iterator[tuple[Part, dict[str, Any]]]:
    if launcher.stays_here:
        for part in parts:
            yield part, _with_a_bar(maker, policies, part, progress)
        return
    row = progress.add_task("trainings", total=len(parts))
    for pair in launcher.run(partial(train_seed, maker, policies), parts):
        progress.advance(row)
        yield pair


def _with_a_bar(
    maker: Maker, policies: Sequence[str], part: Part, progress: Progress
) -> dict[str, Any]:
    task = maker(part[0])
    row = progress.add_task(f"{part[0]}, seed {part[1]}", total=task.n_steps)
    return train_seed(lambda _: task, policies, part, lambda: progress.advance(row))


def train_seed(
    maker: Maker,
    policies: Sequence[str],
    part: Part,
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Train one model from one seed, in any process: its part of the document.

    Args:
        maker: makes the task of the model.
        policies: names of `POLICIES`; the first is "off".
        part: the model's name, and the seed.
        on_step: called after each step of all policies.
    """
    torch.set_num_threads(1)  # the models are small: a second thread would make them slower
    name, seed = part
    task = maker(name)
    with repeatable():
        replicas = train(task, policies, seed, on_step)
        found: dict[str, Any] = {"facts": {"n_steps": task.n_steps, **task.facts}}
        if seed == 0:
            found["choices"] = choices(replicas)
        runs = [replica.finish() for replica in replicas.values()]
        if seed == 0:
            found["gradient_errors"] = errors(replicas["off"].model, task, policies[1:], seed)
    found["runs"] = [{"model": task.name, **asdict(run)} for run in runs]
    return found


def _add(document: dict[str, Any], part: Part, found: dict[str, Any]) -> None:
    name = part[0]
    document["models"][name] = found["facts"]
    document["runs"] += found["runs"]
    if "choices" in found:
        document.setdefault("choices", {})[name] = found["choices"]
        document["gradient_errors"][name] = found["gradient_errors"]
