"""`cswap warm`: kernels are compiled beforehand, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from cswap import cli, warm
from cswap.errors import ConfigError, UnknownCodecError
from cswap_kernels import jit

USE = """
import logging, torch, cswap
logging.basicConfig(format="%(message)s")
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
with cswap.install(model, codec="bitpack", min_bytes=0) as handle:
    model(torch.randn(64, 64)).sum().backward()
x = torch.randint(9, (1 << 20,))
cswap.get_codec("bitpack").encode(x)
"""


def test_each_codec_is_a_step_and_then_the_profiler():
    assert list(warm.steps(["raw"])) == ["raw", "profiler"]
    assert {"zvc", "int8", "zvc+int8"} <= set(warm.names())


@pytest.mark.slow  # `make test` does it where no kernels are compiled
def test_processes_share_the_work():
    assert sorted(warm.steps(["raw"], jobs=2)) == ["profiler", "raw"]


def test_an_unknown_codec_is_refused_before_anything_is_compiled():
    result = CliRunner().invoke(cli.app, ["warm", "raw", "zcv"])
    assert isinstance(result.exception, UnknownCodecError)


def test_a_dtype_alone():
    assert list(warm.steps(["raw"], dtypes=[torch.float32])) == ["raw", "profiler"]


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    result = CliRunner().invoke(cli.app, ["warm", "raw", "--dtype", "float23"])
    assert isinstance(result.exception, ConfigError)
    assert "dtype='float23'" in str(result.exception)
    assert "bfloat16" in str(result.exception)


@pytest.mark.slow
def test_a_process_after_it_compiles_nothing(tmp_path):
    path = os.pathsep.join([str(Path(p)) for p in sys.path if p])
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )

    assert jit.COMPILING in run("-c", USE).stderr
    for file in tmp_path.rglob("*.nbi"):
        file.unlink()
    run("-m", "cswap", "warm", "bitpack")
    assert run("-c", USE).stderr == ""
