"""Kernels compiled beforehand: a cache folder that was filled elsewhere."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("numba.cuda.extending", reason="numba-cuda is not installed")

from bench.gpu import build
from bench.pages import committed
from cswap.codecs import cubins
from cswap.codecs.launcher import DEFAULT_SHAPE, Arguments, Launcher, LaunchShape
from cswap.errors import UnsupportedError
from cswap.experiments.files.reading import load
from cswap_kernels.cuda import compiler
from cswap_kernels.cuda.compiler import Cubin

MADE = Cubin(b"\x7fELF in the folder", "entry", 32, 0, 1024)
OWN = Cubin(b"\x7fELF compiled here", "entry", 32, 0, 1024)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of two kernels for two architectures, that the environment names."""
    path = tmp_path / "kernels"
    monkeypatch.setattr(build, "compiled", lambda _name, _architecture: MADE)
    build.build(path, ["zvc-4-encode", "zvc+int8-4-decode"], [80, 90], processes=1)
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(path))
    return path


def fetch(name, architecture=90, threads=256):
    return cubins.cached(cubins.key(name, threads), architecture, lambda: OWN)


@pytest.mark.usefixtures("folder")
def test_kernels_come_from_the_folder():
    assert fetch("zvc-4-encode") == MADE
    assert fetch("zvc+int8-4-decode", 80) == MADE


@pytest.mark.usefixtures("folder")
def test_what_is_not_in_the_folder_is_compiled():
    assert fetch("csr-4-encode") == OWN
    assert fetch("zvc-4-encode", 100) == OWN
    assert fetch("zvc-4-encode", threads=512) == OWN


@pytest.mark.usefixtures("folder")
def test_kernels_of_other_sources_are_not_taken(monkeypatch):
    monkeypatch.setattr(compiler, "sources", lambda: "other")
    assert fetch("zvc-4-encode") == OWN
    assert fetch("zvc+int8-4-decode") == OWN


@pytest.fixture
def launcher(monkeypatch):
    """A launcher of the library whose driver is a stand-in: functions are (code, entry)."""
    made = object.__new__(Launcher)
    made._driver = SimpleNamespace(
        cuCtxGetCurrent=lambda: (0, 1),
        cuModuleLoadData=lambda code: (0, code),
        cuModuleGetFunction=lambda module, entry: (0, (module, entry)),
    )
    made.architecture, made._context, made._lock = 90, 1, threading.Lock()
    made._kernels, made._failed = {}, {}
    made._arguments, made._is_alone = Arguments(), False
    made._launch_by_cupy = None

    def compiled(name, *_):
        raise AssertionError(f"{name} was compiled")

    monkeypatch.setattr(compiler, "compile_kernel", compiled)
    return made


def test_a_device_loads_every_kernel_from_the_folder_and_compiles_none(
    tmp_path, monkeypatch, launcher
):
    """All that `make test-gpu SLICE=codecs` launches comes from a folder that was filled before."""
    monkeypatch.setattr(
        build, "compiled", lambda name, sm: Cubin(f"{name} for {sm}".encode(), name, 32, 0, 0)
    )
    build.build(tmp_path, build.kernel_names(), [80, 90], processes=1)
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path))
    # A launch shape that is not in the folder must not cost the kernel that is.
    with pytest.raises(UnsupportedError, match="was compiled"):
        launcher._load("zvc-4-encode", LaunchShape(512))
    for name in build.kernel_names():
        loaded = launcher._load(name, DEFAULT_SHAPE)
        assert loaded.function == (f"{name} for 90".encode(), name.encode())


def test_a_build_is_recorded_as_a_result_file(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "compiled", lambda _name, _architecture: MADE)
    folder, path = tmp_path / "kernels", tmp_path / build.FILE
    row = build.build(folder, ["zvc-4-encode", "zvc-4-decode"], [80, 90], processes=1)
    build.record(path, row, build.facts())
    document = load(path)
    assert document["kind"] == "gpu build"
    (found,) = document["rows"]
    assert (found["architectures"], found["n_kernels"]) == ("sm_80, sm_90", 4)
    assert found["nbytes"] == sum(x.stat().st_size for x in folder.rglob("*.json"))
    monkeypatch.setattr(committed, "RESULTS", tmp_path)
    assert "| sm_80, sm_90 | 4 | 1 |" in build.build_table()


def test_every_kernel_has_a_name():
    found = build.kernel_names()
    assert len(found) == len(set(found)) == 118
    assert {"zvc-1-encode", "zvc+int8-8-decode", "zfp-4-encode"} <= set(found)
