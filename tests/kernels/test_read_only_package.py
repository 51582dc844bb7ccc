"""Kernels where nothing can be written, or nothing any more: compiled anew, and said once."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core import config
from numba.core.caching import IndexDataCacheFile

import cswap
import cswap_kernels
from cswap import doctor
from cswap_kernels import jit

CANNOT = "Compiled kernels cannot be kept"

DROP = """
import ctypes, os, sys
if os.geteuid() == 0:  # to whom nothing is read-only, but for this
    CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24
    if ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0):
        sys.exit(77)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Runs Python without the right to write what is read-only."""

KERNELS = """
import logging
import numpy as np
from cswap_kernels import __path__, jit, queue, words
logging.basicConfig(format="%(name)s: %(message)s")
turns = np.zeros(3, np.int64)
assert [queue.wait_and_add(turns, chunk, 5) for chunk in (0, 1)] == [0, 5]
assert words.nonzero_loop(np.arange(8, dtype=np.uint32), 0, 4) == 0b1110
print(*__path__, jit.numba_folder())
"""

STEP = """
import torch, cswap
from cswap import doctor
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
handle = cswap.install(model, codec="zvc", min_bytes=1)
model(torch.randn(256, 64)).sum().backward()
assert handle.stats.swapped and not handle.stats.fallbacks
print(*cswap.__path__, *[f.remedy for f in doctor.examine() if f.part == "kernels"])
"""


@pytest.fixture
def read_only(tmp_path):
    """Runs a script with a copy of the packages, where neither they nor a home can be written."""
    packages, home = tmp_path / "packages", tmp_path / "home"
    home.mkdir()
    for package in (cswap, cswap_kernels):
        source = Path(next(iter(package.__path__)))
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, packages / source.name, ignore=ignored)
    for folder in [*packages.rglob("*/"), home]:
        folder.chmod(0o555)

    def run(script):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG", "NUMBA"))}
        environment |= {"PYTHONPATH": str(packages), "HOME": str(home)}
        command = [sys.executable, "-c", DROP, "-c", script]
        done = subprocess.run(
            command, env=environment, cwd=home, capture_output=True, text=True, check=False
        )
        if done.returncode == 77:
            pytest.skip("root cannot give up its right to write everything")
        return done

    yield run, packages
    for folder in [*packages.rglob("*/"), home]:
        folder.chmod(0o755)  # for pytest to remove it


def test_kernels_of_a_read_only_package_run_uncached(read_only):
    run, packages = read_only
    done = run(KERNELS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(packages / "cswap_kernels"), "None"]
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"cswap: {CANNOT}")
    assert "set NUMBA_CACHE_DIR" in said


@pytest.mark.slow
def test_a_step_with_a_read_only_package(read_only):
    run, packages = read_only
    done = run(STEP)
    assert done.returncode == 0, done.stderr
    remedy = "set NUMBA_CACHE_DIR to a folder that you can write, and nobody else"
    assert done.stdout.strip() == f"{packages / 'cswap'} {remedy}"
    assert done.stderr.count(CANNOT) == 1


# A folder that could be written, and then not.


def twice(x):
    return 2 * x


def thrice(x):
    return 3 * x


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    jit._told.clear()
    jit.told_of_compiling.set()
    yield tmp_path
    jit._told.clear()
    jit.told_of_compiling.set()


def fresh():
    """The function as a new process would find it: not compiled."""
    return jit.njit(cache=True)(twice)


def outcome(kernel):
    """What it computes, and how often it was found in the cache."""
    return int(kernel(np.int64(21))), sum(kernel.stats.cache_hits.values())


def test_the_first_compilation_is_said_once_and_what_is_found_is_not_spoken_of(cache, caplog):
    jit.told_of_compiling.clear()
    before_s = jit.compile_s()
    assert [outcome(fresh()), outcome(jit.njit(cache=True)(thrice))] == [(42, 0), (63, 0)]
    assert caplog.messages == [jit.COMPILING]
    assert jit.compile_s() > before_s
    caplog.clear()
    jit.told_of_compiling.clear()
    assert outcome(fresh()) == (42, 1)
    assert caplog.messages == []


def test_what_was_compiled_is_found_again(cache, caplog):
    assert [outcome(fresh()), outcome(fresh())] == [(42, 0), (42, 1)]
    assert len(list(cache.rglob("*.nbi"))) == 1
    assert not caplog.records


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_takes_no_more(cache, caplog, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(IndexDataCacheFile, "_save_index", refuse)
    assert [outcome(fresh()), outcome(fresh())] == [(42, 0), (42, 0)]
    (record,) = caplog.records
    assert record.name == "cswap"
    assert record.getMessage().startswith(f"{CANNOT} ([Errno {number}] {os.strerror(number)}). ")


def test_a_file_that_cannot_be_read(cache, caplog, monkeypatch):
    fresh()(1)

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(IndexDataCacheFile, "_load_index", refuse)
    assert outcome(fresh()) == (42, 0)
    (record,) = caplog.records
    assert "Permission denied" in record.getMessage()


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [b"", b"\x80\x04nonsense"])
def test_a_damaged_file_is_written_anew(cache, caplog, suffix, damage):
    outcome(fresh())
    (file,) = cache.rglob(f"*.{suffix}")
    file.write_bytes(damage)
    assert [outcome(fresh()), outcome(fresh())] == [(42, 0), (42, 1)]
    (record,) = caplog.records
    assert "twice is damaged" in record.getMessage()


LOCKS = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_another_process_has_locked_is_not_used(cache, caplog, monkeypatch):
    outcome(fresh())
    (lock,) = cache.rglob("lock")
    monkeypatch.setattr(jit, "LOCK_WAIT_S", 0.01)
    with subprocess.Popen(
        [sys.executable, "-c", LOCKS, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        kernel = fresh()
        assert outcome(kernel) == (42, 0)  # compiled, not loaded
        assert kernel(1.5) == 3  # another signature, not kept
        other.communicate()
    assert outcome(fresh()) == (42, 1)
    kernel = fresh()
    assert (kernel(1.5), sum(kernel.stats.cache_hits.values())) == (3, 0)
    assert not caplog.records


# What `cswap doctor` says.


def kernels():
    return doctor._kernels()


def test_doctor_names_the_remedy_where_nothing_can_be_kept(monkeypatch):
    monkeypatch.setattr(jit, "numba_folder", lambda: None)
    found = kernels()
    assert found.usable
    assert found.detail.startswith("cannot be kept")
    assert found.remedy == "set NUMBA_CACHE_DIR to a folder that you can write, and nobody else"


def test_doctor_names_a_cache_that_others_can_write(monkeypatch, tmp_path):
    cache = tmp_path / "above" / "cache"
    cache.mkdir(parents=True)
    monkeypatch.setattr(jit, "numba_folder", lambda: cache)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(cache.parent))
    for above, own, named in [
        (0o755, 0o700, None),
        (0o755, 0o777, cache),
        (0o777, 0o700, cache.parent),
        (0o1777, 0o700, None),
        (0o1777, 0o770, cache),
    ]:
        cache.parent.chmod(above)
        cache.chmod(own)
        expected = f"{named} may be written by others" if named else "nothing: the first use"
        assert kernels().remedy.startswith(expected)
