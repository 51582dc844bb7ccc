"""The results of one part: a file that is whole after every measurement, and that a run continues.

A measurement has a name. A name that an earlier run measured is not measured again, so a run that
was interrupted or killed goes on with the next measurement.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.experiments.files.environment import version_of
from cswap.experiments.files.resumable import Partial, same_code, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bench.gpu.meter import Meter

EXPECTED_S: Final = {"codecs": 10.0, "link": 5.0, "swap": 20.0, "training": 60.0, "trace": 60.0}
"""The parts in their order, and the seconds that a measurement may need while none was made."""

MARGIN: Final = 1.5
"""A measurement may need this much more time than the part's longest so far."""

MOST_BEGUN: Final = 2
"""A measurement that ended the process so often is not begun again: it may be the cause."""

PACKAGES: Final = (
    *("numba-cuda", "cuda-bindings", "cuda-core", "nvidia-nvcomp-cu13"),
    *("cupy-cuda13x", "trl", "torchtune"),
)


class OutOfTimeError(Exception):
    """The next measurement might not end within the time."""


class BrokenDeviceError(Exception):
    """The device answers every call with an error since a measurement failed."""


class Deadline:
    """A moment at which everything has ended."""

    def __init__(self, within_s: float | None) -> None:
        """Args: within_s: seconds from now; None: there is no such moment."""
        self._at_s = None if within_s is None else time.monotonic() + within_s

    def allow(self, name: str, expected_s: float) -> None:
        """Allow a measurement that may need so many seconds.

        Raises:
            OutOfTimeError: less is left.
        """
        left_s = None if self._at_s is None else self._at_s - time.monotonic()
        if left_s is not None and left_s < expected_s:
            raise OutOfTimeError(
                f"{name} may need {expected_s:.0f} s, and {max(0.0, left_s):.0f} s are left"
            )


class Report:
    """The results of one part.

    Attributes:
        part: its name.
        path: the result file, once all measurements are made.
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        meter: Meter,
        gpu: dict[str, Any],
        deadline: Deadline | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Continue the results of the part that are in the folder, if the code is the same.

        Args:
            folder: of the files.
            part: its name, a key of `EXPECTED_S`.
            meter: of the device.
            gpu: facts about the device. Results of a GPU or a torch with other names are not
                continued.
            deadline: of all measurements; default: none.
            settings: others of these are not continued, either.
        """
        self.part, self._meter = part, meter
        self._deadline = deadline or Deadline(None)
        self.path = folder / f"{part}.json"
        fields: dict[str, Any] = {
            "kind": f"gpu {part}",
            "version": 2,
            "settings": {"gpu": gpu["name"], "torch": torch.__version__, **(settings or {})},
        }
        self._partial = Partial(self.path, **fields)
        mine = self._partial.document
        finished = stored(self.path, {"environment": dict, "rows": list}, complete=True, **fields)
        self._finished = finished if finished and same_code(finished, mine) else None
        if not self._partial.went_on:
            mine["environment"]["gpu"] = gpu
            _set_aside(self._partial)
        self._notes: list[dict[str, str]] = []

    @property
    def document(self) -> dict[str, Any]:
        """The result file's content with all measurements so far."""
        if self._finished is not None:
            return self._finished
        kept = {key: value for key, value in self._partial.document.items() if key != "done"}
        return {**kept, **self._content()}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of these measurements that were not made."""
        done = self._partial.document["done"]
        return [n for n in names if self._finished is None and "rows" not in done.get(n, {})]

    def measure(
        self, name: str, make: Callable[[], Sequence[Any]], line: Callable[[Any], str]
    ) -> None:
        """Make a measurement, unless an earlier run made it. An error is its result, too.

        Args:
            name: the same in every run.
            make: returns the measurement's rows, dataclasses.
            line: words a row for the terminal.

        Raises:
            OutOfTimeError: it might not end in time; nothing was done.
            BrokenDeviceError: it broke the device: nothing else can run in this process.
        """
        if not self.missing([name]):
            return
        done = self._partial.document["done"]
        n_begun = done.get(name, {}).get("begun", 0)
        if n_begun >= MOST_BEGUN:
            self.refuse(name, f"the process ended {n_begun} times while this was measured")
            return
        self._deadline.allow(name, self._expected_s())
        done[name] = {"begun": n_begun + 1}
        self._partial.save()
        start_s, rows = time.monotonic(), []
        try:
            for row in make():
                rows.append(asdict(row))
                self._say(f"{name}: {line(row)}")
        except KeyboardInterrupt:
            done[name] = {"begun": n_begun}  # the user ended the process
            self._partial.save()
            raise
        except Exception as error:  # one failure must not cost the other measurements
            self.skip(name, error)
        self._end(name, rows, time.monotonic() - start_s)
        self._check_device(name)

    def fact(self, name: str, find: Callable[[], Any]) -> Any:
        """A JSON-able value that later runs take over: `find` is called once."""
        return self._partial.part(name, lambda: {"rows": [], "skipped": [], "value": find()})[
            "value"
        ]

    def refuse(self, name: str, why: object) -> None:
        """Take down that a measurement is not made, unless an earlier run made it."""
        if self.missing([name]):
            self.skip(name, why)
            self._end(name, [], 0.0)

    def skip(self, what: str, why: object) -> None:
        """Take down that a part of the current measurement is not made."""
        reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)
        # The first line: CUDA adds advice on debugging to its errors.
        reason = (reason.splitlines() or [""])[0][:300]
        self._notes.append({"what": what, "why": reason})
        self._say(f"{what}: skipped ({reason})")

    def finish(self) -> None:
        """Write the result file: every measurement was made, or is taken down as skipped."""
        if self._finished is None:
            self._finished = self._partial.finish(**self._content())

    def _end(self, name: str, rows: list[dict[str, Any]], took_s: float) -> None:
        found = {"rows": rows, "skipped": self._notes, "took_s": took_s}
        self._partial.document["done"][name], self._notes = found, []
        self._partial.save()

    def _content(self) -> dict[str, Any]:
        done = self._partial.document["done"].values()
        return {
            "part": self.part,
            "rows": [row for found in done for row in found.get("rows", ())],
            "skipped": [note for found in done for note in found.get("skipped", ())],
        }

    def _expected_s(self) -> float:
        done = self._partial.document["done"].values()
        longest_s = max((found.get("took_s", 0.0) for found in done), default=0.0)
        return MARGIN * longest_s if longest_s else EXPECTED_S[self.part]

    def _check_device(self, name: str) -> None:
        try:
            self._meter.synchronize()
        except RuntimeError as error:
            raise BrokenDeviceError(f"no call to the device works after {name}: {error}") from error

    def _say(self, line: str) -> None:
        print(f"[{self.part}] {line}", flush=True)


def _set_aside(partial: Partial) -> None:
    # Results of other code are not continued. They cost time on a GPU, so they are not replaced.
    path = partial.path
    if path is None or not path.exists():
        return
    n = 1
    while (other := path.with_name(path.name.replace(".", f"-before-{n}.", 1))).exists():
        n += 1
    path.rename(other)
    print(f"{path.name} has results of other code, another GPU or another torch: now {other.name}")


def slug(name: str) -> str:
    """A device's name as that of a folder.

    >>> slug("NVIDIA H200 (80GB) ")
    'nvidia-h200-80gb'
    """
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def gpu_facts(index: int = 0) -> dict[str, Any]:
    """The GPU, as results record it."""
    properties = torch.cuda.get_device_properties(index)
    return {
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


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The kernel driver's version, as the driver itself says it."""
    if not file.exists():
        return None
    match = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text())
    return match[1] if match else None
