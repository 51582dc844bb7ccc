"""The versions that the tests passed with: a row per environment and selection of tests.

A test run writes its row itself (``pytest --record-versions FILE``, see tests/conftest.py), and
only if no test failed. GPU tests run where few packages are installed: nothing is imported here but
the standard library, and torch, which every test needs.
"""

from __future__ import annotations

import json
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).resolve().parents[2] / "docs" / "tested-versions.json"
PACKAGES: Final = ("torch", "transformers", "lightning", "accelerate")
WHICH: Final = ("python", *PACKAGES, "cuda", "gpu", "tests")
"""Keys that tell rows apart; a later run replaces the row that has the same."""


def row(tests: str, passed: int, skipped: int) -> dict[str, Any]:
    """The row of a test run in this environment.

    Args:
        tests: the selection of tests, as pytest's arguments.
        passed: number of tests that passed.
        skipped: number of tests that were skipped, for lack of a package or a device.
    """
    import torch

    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "tests": tests,
        "passed": passed,
        "skipped": skipped,
        "on": datetime.now(timezone.utc).date().isoformat(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def record(new: dict[str, Any], path: Path = FILE) -> None:
    """Put a row into the file; it replaces an earlier one of the same versions and tests."""
    others = [one for one in rows(path) if any(one[key] != new[key] for key in WHICH)]
    found = sorted([*others, new], key=lambda one: [str(one[key]) for key in WHICH])
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def rows(path: Path = FILE) -> list[dict[str, Any]]:
    """The rows of the file; none if there is no file."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def versions_table() -> str:
    """The versions that the tests passed with."""
    from bench.pages.committed import as_markdown

    lines = [
        [
            *(one[name] or "-" for name in ("python", "torch")),
            *(one[name] or "none" for name in ("cuda", "gpu")),
            *(one[name] or "-" for name in PACKAGES[1:]),
            f"`{one['tests']}`",
            f"{one['passed']}, {one['skipped']}",
            one["on"],
        ]
        for one in rows()
    ]
    headings = ["Python", "torch", "CUDA", "GPU", "transformers", "Lightning", "accelerate"]
    return as_markdown([*headings, "tests", "passed, skipped", "on"], lines)
