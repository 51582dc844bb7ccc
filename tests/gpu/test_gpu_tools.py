"""The kernels under compute-sanitizer, and the benchmarks' smallest run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def run(*command, **environment):
    paths = os.pathsep.join(
        [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    ).rstrip(os.pathsep)
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.skipif(not Path(SANITIZER).exists(), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_kernels_under_compute_sanitizer(tool):
    # Without torch's cache every tensor is an allocation of its own, whose ends are watched.
    done = run(
        # Of calls that fail, cuda-bindings makes some to find out what the driver has.
        *(SANITIZER, "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"),
        *(sys.executable, str(Path(__file__).with_name("sanitized.py"))),
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
    said = done.stdout + done.stderr
    if "not supported" in said and "round trips" not in said:
        pytest.skip(f"compute-sanitizer does not take this device: {said.strip()[-200:]}")
    assert done.returncode == 0, said[-4000:]
    assert "round trips" in said


@pytest.mark.slow
def test_the_benchmark_of_codecs_leaves_its_results(tmp_path):
    done = run(
        *(sys.executable, "-m", "bench", "gpu", "codecs", "--first", "--minutes", "1"),
        *("--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    document = json.loads((tmp_path / "codecs.json").read_text(encoding="utf-8"))
    assert document["complete"]
    assert document["rows"]
