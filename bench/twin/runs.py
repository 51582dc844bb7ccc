"""Runs of the twin, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT: Final = Path(__file__).resolve().parents[2]

JOBS: Final = 2
"""Processes at a time."""


class FailedError(RuntimeError):
    """A process ended with an error; the text is the last line of it."""


def call(module: str, argument: object, root: Path = ROOT) -> Any:
    """The JSON that ``python -m bench.twin.MODULE ARGUMENT`` prints.

    Args:
        module: of this package.
        argument: made JSON, if it is no text.
        root: the repository whose engine is run.

    Raises:
        FailedError: it ended with an error.
    """
    text = argument if isinstance(argument, str) else json.dumps(argument)
    with tempfile.TemporaryDirectory(prefix="cswap-twin-") as cache:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CSWAP_")}
        same = {"CSWAP_CACHE_DIR": cache, "CSWAP_CALIBRATE": "0", "PYTHONHASHSEED": "0"}
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (root, root / "kernels")))}
        command = [sys.executable, "-m", f"bench.twin.{module}", text]
        done = subprocess.run(
            command,
            cwd=root,
            env={**kept, **same, **paths},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        lines = done.stderr.split("\n") if done.stderr.strip() else [""]
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        raise FailedError(f"exit code {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def rows(wanted: Iterable[dict[str, Any]], root: Path = ROOT) -> Iterator[dict[str, Any]]:
    """Rows of `bench.twin.worker`, in turn, as they are done. One that fails says why."""

    def row(arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            found: dict[str, Any] = call("worker", arguments, root)
        except FailedError as error:
            return {**arguments, "failure": str(error)}
        return found

    with ThreadPoolExecutor(JOBS) as pool:
        yield from pool.map(row, wanted)
