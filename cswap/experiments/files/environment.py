"""The environment of a result: machine, versions, commit, command."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

from cswap.cores import usable_cores

ROOT: Final = Path(__file__).resolve().parents[3]
"""Folder above the package: of a checkout the repository's root."""

IS_CHECKOUT: Final = (ROOT / "pyproject.toml").exists()
CODE: Final = ("cswap", "kernels", "bench") if IS_CHECKOUT else ("cswap", "cswap_kernels")
"""Folders below `ROOT` with the code that results may depend on."""

PACKAGES = (
    "cswap",
    "torch",
    "numpy",
    "numba",
    "scikit-learn",
    "matplotlib",
    "lz4",
    "zstandard",
    "blosc2",
    "zfpy",
)


def environment() -> dict[str, object]:
    """The facts that a reader needs to judge or repeat a measurement, as JSON-able values."""
    load_average = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "n_cpus": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load_average_before": load_average,
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "cswap_commit": _git("rev-parse", "HEAD"),
        "cswap_modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "command": " ".join([*_program(), *sys.argv[1:]]),
        "code": code_digest(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


@cache
def code_digest() -> str:
    """Twelve hexadecimal digits of all sources: an unfinished run of other code is begun anew."""
    found = hashlib.sha256()
    for file in sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        found.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def _program() -> list[str]:
    name = Path(sys.argv[0])
    is_cswap = name.name == "cswap" or name.parts[-2:] == ("cswap", "__main__.py")
    return ["cswap"] if is_cswap else ["python", "-m", "bench"]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def version_of(name: str) -> str | None:
    """Return a package's version, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Return git's answer, or None without git or a checkout of cswap."""
    git = shutil.which("git")
    # An installed package may lie in the repository of another project.
    if git is None or not IS_CHECKOUT:
        return None
    done = subprocess.run([git, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
