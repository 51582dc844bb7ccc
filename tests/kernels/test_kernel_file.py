"""Kernels compiled beforehand: a file that CSWAP_KERNELS names."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("numba.cuda.extending", reason="numba-cuda is not installed")

from bench.gpu import build
from bench.pages import committed
from cswap.codecs import cubins
from cswap.codecs.launcher import DEFAULT_SHAPE, Arguments, Launcher, LaunchShape
from cswap.errors import ConfigError, UnsupportedError
from cswap.experiments.files.reading import load
from cswap_kernels.cuda import compiler
from cswap_kernels.cuda.compiler import Cubin

MADE = Cubin(b"\x7fELF in the file", "entry", 32, 0, 1024)
OWN = Cubin(b"\x7fELF compiled here", "entry", 32, 0, 1024)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of two kernels for two architectures, that the environment names."""
    tmp_path.chmod(0o700)
    path = tmp_path / "kernels.zip"
    monkeypatch.setattr(build, "compiled", lambda _name, _architecture: MADE)
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(cubins.VARIABLE, str(path))
    cubins._opened.cache_clear()
    build.build(path, ["zvc-4-encode", "zvc+int8-4-decode"], [80, 90], processes=1)
    yield path
    cubins._opened.cache_clear()


def fetch(name, architecture=90, threads=256):
    return cubins.cached(cubins.key(name, threads), architecture, lambda: OWN)


def test_kernels_come_from_the_file(file):
    assert fetch("zvc-4-encode") == MADE
    assert fetch("zvc+int8-4-decode", 80) == MADE


def test_what_is_not_in_the_file_is_compiled(file):
    assert fetch("csr-4-encode") == OWN
    assert fetch("zvc-4-encode", 100) == OWN
    assert fetch("zvc-4-encode", threads=512) == OWN


def test_kernels_of_other_sources_are_not_taken(file, monkeypatch, caplog):
    monkeypatch.setattr(compiler, "sources", lambda: "other")
    assert fetch("zvc-4-encode") == OWN
    assert fetch("zvc+int8-4-decode") == OWN
    assert [r.getMessage().split(",")[0].split(": ")[1] for r in caplog.records] == [
        "kernels of another version of cswap"
    ]


def test_a_missing_file_is_an_error(file):
    file.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        fetch("zvc-4-encode")


def test_a_file_that_others_may_write_is_refused(file):
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="others may write it"):
        fetch("zvc-4-encode")


def test_another_file_is_refused(file):
    file.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="not a file with kernels"):
        fetch("zvc-4-encode")


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


def test_a_device_loads_every_kernel_from_the_file_and_compiles_none(
    tmp_path, monkeypatch, launcher
):
    """All that `make test-gpu SLICE=codecs` launches comes from a file that was built before."""
    path = tmp_path / "kernels.zip"
    monkeypatch.setattr(
        build, "compiled", lambda name, sm: Cubin(f"{name} for {sm}".encode(), name, 32, 0, 0)
    )
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(cubins.VARIABLE, str(path))
    cubins._opened.cache_clear()
    build.build(path, build.kernel_names(), [80, 90], processes=1)
    # A launch shape that is not in the file must not cost the kernel that is.
    with pytest.raises(UnsupportedError, match="was compiled"):
        launcher._load("zvc-4-encode", LaunchShape(512))
    for name in build.kernel_names():
        loaded = launcher._load(name, DEFAULT_SHAPE)
        assert loaded.function == (f"{name} for 90".encode(), name.encode())
    cubins._opened.cache_clear()


def test_a_build_is_recorded_as_a_result_file(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "compiled", lambda _name, _architecture: MADE)
    file, path = tmp_path / "kernels.zip", tmp_path / build.FILE
    row = build.build(file, ["zvc-4-encode", "zvc-4-decode"], [80, 90], processes=1)
    build.record(path, row, build.facts())
    document = load(path)
    assert document["kind"] == "gpu build"
    (found,) = document["rows"]
    assert (found["architectures"], found["n_kernels"]) == ("sm_80, sm_90", 4)
    assert found["nbytes"] == file.stat().st_size
    monkeypatch.setattr(committed, "RESULTS", tmp_path)
    assert "| sm_80, sm_90 | 4 | 1 |" in build.build_table()


def test_every_kernel_has_a_name():
    found = build.kernel_names()
    assert len(found) == len(set(found)) == 126
    assert {"zvc-1-encode", "zvc+int8-8-decode", "zfp-4-encode", "profile-8-sample"} <= set(found)
