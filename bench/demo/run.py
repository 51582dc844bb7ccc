"""Runs the demo: trains, compares, and writes the results, also after an interrupt."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    track,
)

from bench.demo import summary as results
from bench.demo import tables
from bench.demo.pictures import draw
from bench.workloads.lockstep import Lockstep, Replica
from bench.workloads.tasks import make_task
from cswap import warm
from cswap.experiments.files.environment import environment
from cswap.experiments.files.writing import write
from cswap.experiments.options import INTERRUPTED, N_THREADS
from cswap.report import terminal
from cswap_kernels.jit import numba_folder

if TYPE_CHECKING:
    from bench.demo.settings import DemoSettings
    from cswap.experiments.task import Task

VERSION = 1  # of results.json

CODECS = ("bitpack", "zvc+expk", "int8")
"""The codecs that the two models use; the longest to compile first."""

DTYPES = (torch.float32, torch.int64, torch.bool)
"""Of the tensors that the two models save: activations, indices of pooling, masks of dropout."""


class Demo:
    """One run of the demo, with its results so far."""

    def __init__(self, settings: DemoSettings, console: Console) -> None:
        self.settings, self.console = settings, console
        self.started_s = time.perf_counter()
        self.environment = environment()
        self.compile_s = 0.0
        self.facts: dict[str, dict[str, object]] = {}
        self.warm_up_s: dict[str, dict[str, float]] = {}
        self.runs: dict[str, Lockstep] = {}

    def compile(self) -> None:
        """Compile the kernels in two processes, where none is on the disk.

        The first step would compile them one after the other.
        """
        kernels = numba_folder()
        if kernels is None or any(kernels.glob("*.nbi")):
            return
        started_s = time.perf_counter()
        parts = warm.steps(CODECS, jobs=2, dtypes=DTYPES)
        total = len(CODECS) + 1
        for _ in track(parts, "compiling kernels", total, console=self.console):
            pass
        self.compile_s = time.perf_counter() - started_s

    def train(self) -> None:
        """Train every model in every mode."""
        bar = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn())
        with Progress(*bar, TimeElapsedColumn(), console=self.console) as progress:
            for name in self.settings.models:
                task = make_task(name, quick=self.settings.quick, n_steps=self.settings.n_steps)
                self.facts[name] = {"n_steps": task.n_steps, **task.facts}
                self._warm_up(task)
                self._all_modes(task, progress)

    def _warm_up(self, task: Task) -> None:
        """Do one step per mode on a throw-away model.

        So the time of compiling kernels is reported separately, not as run time.
        """
        for mode in self.settings.modes:
            started_s = time.perf_counter()
            replica = Replica(task, mode, self.settings.seed)
            replica.compute_gradients(task.batch(self.settings.seed, 0), 0)
            replica.close()
            took_s = time.perf_counter() - started_s
            self.warm_up_s.setdefault(task.name, {})[mode] = took_s

    def _all_modes(self, task: Task, progress: Progress) -> None:
        label = f"{task.name}: {', '.join(self.settings.modes)}"
        bar = progress.add_task(label, total=task.n_steps)
        run = Lockstep(task, self.settings.modes, self.settings.seed, looks=(0.0, 1.0))
        self.runs[task.name] = run
        try:
            run.run(lambda n_steps: progress.update(bar, completed=n_steps))
        finally:
            run.close()

    def document(self, *, complete: bool) -> dict[str, Any]:
        """Return everything found so far, as JSON-able values."""
        return {
            "kind": "demo",
            "version": VERSION,
            "rows": [asdict(row) for row in self.rows()],
            "complete": complete,
            "environment": {
                **self.environment,
                "seconds": time.perf_counter() - self.started_s,
                "compile_s": self.compile_s,
                "warm_up_s": self.warm_up_s,
            },
            "settings": {**asdict(self.settings), "out": str(self.settings.out)},
            "models": self.facts,
            "how_measured": results.HOW_MEASURED,
            "curves": {name: results.curves(run) for name, run in self.runs.items()},
        }

    def rows(self) -> list[results.Row]:
        """Return a row per model and mode."""
        return [row for run in self.runs.values() for row in results.rows(run)]


def run(settings: DemoSettings, console: Console | None = None) -> int:
    """Run the demo and write its files.

    Returns:
        0, or 130 if interrupted; the files then hold the results so far.
    """
    console = console or Console()
    torch.set_num_threads(N_THREADS)
    demo = Demo(settings, console)
    complete = False
    try:
        demo.compile()
        demo.train()
        complete = True
    except KeyboardInterrupt:
        console.print(
            "[bold red]Interrupted:[/] the results so far are written, with complete = false."
        )
    finally:
        _write_down(demo, complete=complete)
    return 0 if complete else INTERRUPTED


def _write_down(demo: Demo, *, complete: bool) -> None:
    json_path, picture_path = demo.settings.out / "results.json", demo.settings.out / "demo.png"
    rows = demo.rows()
    write(json_path, demo.document(complete=complete))
    terminal.show(tables.comparison(rows), drop=tables.DROPPED, console=demo.console)
    for line in tables.fallback_lines(rows):
        demo.console.print(f"[bold red]{line}[/]")
    if demo.runs:
        draw(list(demo.runs.values()), rows, picture_path)
    seconds = time.perf_counter() - demo.started_s
    demo.console.print(
        f"{seconds:.0f} s in all. Written: {json_path}, {picture_path if demo.runs else ''}"
    )
    for line in tables.conclusions(rows):
        demo.console.print(f"[bold]{line}[/]", soft_wrap=True)
