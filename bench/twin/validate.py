"""Holds the twin against the rows that were measured on an H200.

The engine of the measured rows is run, from the repository's history. Constants were fitted to the
rows of GPT-2 small and to swaps of 64 MiB, and the rate of TF32 convolutions to the plain step of
ResNet-50, since GPT-2 has none; the other rows were held out.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.twin.profiles import H200
from bench.twin.runs import ROOT, call, rows
from cswap.errors import UnsupportedError
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from collections.abc import Iterator

MEASURED: Final = ROOT / "bench" / "results" / "nvidia-h200"
N_STEPS: Final = 13
"""Steps of a measured row."""

ENGINE: Final = "6d79033"
"""Commit whose engine was measured."""

OF_TODAY: Final = "bench/gpu/training.py"
"""The file that the twin needs as it is now, besides its own folder."""

FITTED: Final = ("GPT-2 small", "64 MiB", "ResNet-50, no swapping")
"""Parts of the names of rows that constants were fitted to."""

MODELS: Final = {"GPT-2 small": "gpt2-small", "ResNet-50": "resnet50"}
METHODS: Final = {
    "no swapping": "plain",
    "checkpoint": "checkpoint",
    "save_on_cpu": "save_on_cpu",
    "TRL OffloadActivations": "TRL's offload",
    "cswap raw": "raw",
    "cswap lossless": "default",
    "cswap int8": "int8",
}

PLAIN, PEER, ENGINE_ROW, PEAK = 0.05, 0.15, 0.20, 0.03
"""Bounds of a relative error: of plain steps, peers' steps, cswap's steps and swaps, and peaks."""


@dataclass(frozen=True, slots=True)
class Residual:
    """A measured figure and the twin's.

    Attributes:
        row: its model and method, or its data, size and way.
        figure: "step ms", "peak GiB", "moved GB", "swapped" (tensors), or "swap us".
        fitted: whether constants were fitted to such rows.
        measured: on the H200.
        simulated: by the twin.
        error: relative.
        bound: of the error.
    """

    row: str
    figure: str
    fitted: bool
    measured: float
    simulated: float
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the error is within its bound."""
        return abs(self.error) <= self.bound


def validate() -> list[dict[str, Any]]:
    """The residuals of all measured rows, as JSON-able objects with ``holds``."""
    with _old_engine() as root:
        found = [*_training(root), *_swaps(root)]
    return [{**asdict(one), "holds": one.holds} for one in found]


def _residual(row: str, figure: str, measured: float, simulated: float, bound: float) -> Residual:
    fitted = any(text in row for text in FITTED)
    return Residual(row, figure, fitted, measured, simulated, simulated / measured - 1, bound)


def _training(root: Path) -> Iterator[Residual]:
    measured = read_object(MEASURED / "training.json", "file")["rows"]
    wanted = [
        {
            "model": MODELS[m["model"]],
            "method": METHODS[m["method"]],
            "profile": H200.name,
            "n_steps": N_STEPS,  # so many were measured: today's default would run more
        }
        for m in measured
    ]
    for m, mine in zip(measured, rows(wanted, root), strict=True):
        name = f"{m['model']}, {m['method']}"
        if "failure" in mine:
            raise RuntimeError(f"{name}: {mine['failure']}")
        bound = ENGINE_ROW if "cswap" in name else PLAIN if "no swapping" in name else PEER
        yield _residual(name, "step ms", m["step_ms"], 1e3 * mine["step_s"], bound)
        peaks = m["peak_allocated_bytes"] / 2**30, mine["peak_of_all_bytes"] / 2**30
        yield _residual(name, "peak GiB", *peaks, PEAK)
        if m["cswap"] is not None:
            its, own = m["cswap"], mine["cswap"]
            moved = 1e-9 * its["encoded_bytes"], 1e-9 * own["encoded_bytes"]
            yield _residual(name, "moved GB", *moved, ENGINE_ROW)
            yield _residual(name, "swapped", its["swapped"], own["swapped"], ENGINE_ROW)


def _swaps(root: Path) -> Iterator[Residual]:
    measured = read_object(MEASURED / "swap.json", "file")["rows"]
    key = ("data", "dtype", "nbytes", "way")
    known = {tuple(m[k] for k in key): m for m in measured}
    for mine in call("swaps", H200.name, root):
        m = known[tuple(mine[k] for k in key)]
        name = f"{mine['data']} {mine['dtype']}, {mine['nbytes'] >> 20} MiB, {mine['way']}"
        swap = 1e6 * m["total_s"], 1e6 * (mine["out_s"] + mine["back_s"])
        yield _residual(name, "swap us", *swap, ENGINE_ROW)


@contextmanager
def _old_engine() -> Iterator[Path]:
    # A checkout of the measured engine, with the twin of today.
    with tempfile.TemporaryDirectory(prefix="cswap-twin-") as folder:
        root = Path(folder) / "cswap"
        git = ["git", "-C", str(ROOT), "worktree"]
        add = [*git, "add", "--quiet", "--detach", str(root), ENGINE]
        done = subprocess.run(add, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnsupportedError(
                f"--validate runs the engine of commit {ENGINE}, which git cannot check out here "
                f"({done.stderr.strip()}). Remedy: a clone with its whole history."
            )
        try:
            shutil.copytree(ROOT / "bench" / "twin", root / "bench" / "twin")
            shutil.copy(ROOT / OF_TODAY, root / OF_TODAY)
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=True)
