"""Trains every model from every seed under all policies, compares, and writes the results."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.experiments import results_page
from cswap.experiments.accuracy import pictures, report
from cswap.experiments.accuracy.summary import summarise
from cswap.experiments.accuracy.train import repeatable, train
from cswap.experiments.files.resumable import Partial
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.experiments.accuracy.study import Study
    from cswap.experiments.task import Task

FILE: Final = "results.json"
VERSION: Final = 3


def compare(study: Study, *, again: bool) -> dict[str, Any]:
    """Train, compare, write and show the results; returns the document.

    Args:
        study: the task, and its options.
        again: do not continue an unfinished run.
    """
    settings, out = study.settings, study.folder / FILE
    partial_ = Partial(out, kind="accuracy", version=VERSION, settings=settings, again=again)
    wanted = {
        f"{model} {seed}": (model, seed)
        for model in settings["models"]
        for seed in range(settings["seeds"][model])
    }
    work = partial(train_seed, study.maker, settings["policies"])
    found = partial_.parts(wanted, work, study.jobs, study.console)
    content = _joined(list(wanted.values()), found)
    summary = summarise({"settings": settings, **content})
    document = partial_.finish(**content, summary=summary)
    drawn = study.folder / "pareto.png"
    pictures.pareto(document, drawn)
    page = results_page.write(study.folder)
    for path in (out, drawn, page):
        study.console.print(literal(f"Written: {path}"), soft_wrap=True)
    report.table(document).show(study.console, drop=report.DROPPED)
    return document


def _joined(
    parts: Sequence[tuple[str, int]], found: Sequence[dict[str, Any]]
) -> dict[str, dict[str, Any] | list[Any]]:
    # The parts' results as the file has them.
    facts = {model: one["facts"] for (model, _), one in zip(parts, found, strict=True)}
    return {"runs": [run for one in found for run in one["runs"]], "models": facts}


def train_seed(
    maker: Callable[[str], Task],
    policies: Sequence[str],
    part: tuple[str, int],
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
        runs = [replica.finish() for replica in replicas.values()]
    return {
        "facts": {"n_steps": task.n_steps, **task.facts},
        "runs": [{"model": task.name, **asdict(run)} for run in runs],
    }
