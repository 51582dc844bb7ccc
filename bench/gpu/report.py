"""Where measurements go: a line on the terminal, and a JSON file that is whole after every one."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from cswap.experiments.files.environment import environment, version_of
from cswap.experiments.files.writing import write

SHARES: Final = {"codecs": 0.35, "link": 0.07, "swap": 0.18, "training": 0.40}
"""Parts in their order, and how much of the whole run's time each may take."""

PACKAGES: Final = ("numba-cuda", "cuda-bindings", "cuda-core", "nvidia-nvcomp-cu13", "trl")


class Deadline:
    """A moment after which nothing new is begun."""

    def __init__(self, within_s: float | None) -> None:
        """Args: within_s: seconds from now; None never passes."""
        self._at_s = None if within_s is None else time.monotonic() + within_s

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self._at_s is not None and time.monotonic() >= self._at_s


def shares(parts: list[str], total_s: float | None) -> dict[str, float | None]:
    """Seconds from the start by which each of the parts is to be done.

    >>> shares(["link", "swap"], 100.0)
    {'link': 28.0, 'swap': 100.0}
    >>> shares(["link"], None)
    {'link': None}
    """
    if total_s is None:
        return dict.fromkeys(parts)
    found: dict[str, float | None] = {}
    whole, done = sum(SHARES[p] for p in parts), 0.0
    for part in parts:
        done += SHARES[part]
        found[part] = round(total_s * done / whole, 6)
    return found


class Report:
    """The results of one part.

    Attributes:
        path: its file.
        document: what is in it.
    """

    def __init__(
        self, folder: Path, part: str, where: dict[str, Any], deadline: Deadline | None = None
    ) -> None:
        """Args: folder: of the file; part: its name; where: environment; deadline: of the part."""
        self.path = folder / f"{part}.json"
        self._deadline = deadline or Deadline(None)
        self._start_s = time.monotonic()
        self.document: dict[str, Any] = {
            "kind": f"gpu {part}",
            "version": 1,
            "part": part,
            "complete": False,
            "environment": where,
            "rows": [],
            "skipped": [],
        }

    def add(self, row: Any, line: str) -> None:
        """Take a measurement down.

        Args:
            row: a dataclass.
            line: the same for the terminal.
        """
        self.document["rows"].append(asdict(row))
        self._say(line)

    def skip(self, what: str, why: object) -> None:
        """Take down that something was not measured."""
        reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)
        # The first line: what CUDA adds to its errors is advice on debugging.
        reason = (reason.splitlines() or [""])[0][:300]
        self.document["skipped"].append({"what": what, "why": reason})
        self._say(f"{what}: skipped ({reason})")

    def out_of_time(self, what: str) -> bool:
        """Whether the part's time is over; if so, ``what`` is taken down as skipped."""
        if self._deadline.passed:
            self.skip(what, "no time left")
        return self._deadline.passed

    def finish(self) -> None:
        """Every measurement was made, or is taken down as skipped."""
        self.document["complete"] = True
        self._say(f"done: {self.path}")

    def _say(self, line: str) -> None:
        elapsed_s = time.monotonic() - self._start_s
        print(f"[{self.document['part']} {elapsed_s:6.1f} s] {line}", flush=True)
        self.document["elapsed_s"] = elapsed_s
        write(self.path, self.document)


def slug(name: str) -> str:
    """A device's name as that of a folder.

    >>> slug("NVIDIA H200 (80GB) ")
    'nvidia-h200-80gb'
    """
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def where(index: int = 0) -> dict[str, Any]:
    """`environment`, and the GPU."""
    found = environment("gpu")
    properties = torch.cuda.get_device_properties(index)
    found["gpu"] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "n_multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "versions": {name: version_of(name) for name in PACKAGES},
    }
    return found


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The kernel driver's version, as the driver itself says it."""
    if not file.exists():
        return None
    match = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text())
    return match[1] if match else None
