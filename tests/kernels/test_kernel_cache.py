"""Machine code of CUDA kernels on disk: kept for this user, and never taken from another."""

from __future__ import annotations

import os
import pwd
import stat

import pytest

pytest.importorskip("numba.cuda.extending", reason="numba-cuda is not installed")

from cswap import cache_folder
from cswap.codecs import cubins
from cswap_kernels.cuda.compiler import Cubin

MADE = Cubin(b"\x7fELF code", "entry", 32, 0, 1024)
EVIL = Cubin(b"\x7fELF evil", "entry", 32, 0, 1024)
NAME = ("zvc-4-encode", 90)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where kernels are to be kept; neither this folder nor the one above exists."""
    monkeypatch.setenv("CSWAP_CACHE_DIR", str(tmp_path / "own" / "cache"))
    monkeypatch.setattr(cache_folder, "_told", set())
    before = os.umask(0)  # what mkdir is told is what comes out
    yield tmp_path / "own" / "cache" / "kernels"
    os.umask(before)


def fetch(made=MADE):
    """The kernel that is run, and whether it was compiled."""
    compiled = []

    def compile_now():
        compiled.append(made)
        return made

    return cubins.cached(*NAME, compile_now), bool(compiled)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def give_away(path, monkeypatch):
    """Let a path belong to another user."""
    if os.geteuid() == 0:
        os.lchown(path, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def test_what_was_compiled_is_kept_for_this_user_alone(folder):
    assert fetch() == (MADE, True)
    assert fetch() == (MADE, False)
    (file,) = folder.iterdir()
    assert [mode(level) for level in (folder.parents[1], folder.parent, folder)] == [0o700] * 3
    assert mode(file) == 0o600


@pytest.mark.parametrize("damage", ["", "{", "[]", '"text"', '{"code": 1}', '{"code": "00"}'])
def test_what_is_damaged_is_made_anew(folder, damage):
    fetch()
    (file,) = folder.iterdir()
    file.write_text(damage)
    assert fetch() == (MADE, True)
    assert fetch() == (MADE, False)


REFUSED = {
    "a folder that a group may write": (lambda folder, file, _: folder.chmod(0o770), 0o770),
    "a folder that all may write": (lambda folder, file, _: folder.chmod(0o1777), 0o1777),
    "a folder of another user": (lambda folder, file, patch: give_away(folder, patch), 0o700),
    "a link to a folder": (
        lambda folder, file, _: folder.symlink_to(folder.rename(folder.with_name("x"))),
        None,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_others_can_write_is_not_used(folder, monkeypatch, caplog, case):
    fetch(EVIL)
    (file,) = folder.iterdir()
    refuse, expected_mode = REFUSED[case]
    refuse(folder, file, monkeypatch)
    before = file.read_bytes()
    assert fetch() == (MADE, True)
    assert fetch() == (MADE, True)
    assert [file.read_bytes(), *folder.iterdir()] == [before, file]
    (record,) = caplog.records
    assert record.name == "cswap"
    assert str(folder) in record.getMessage()
    assert "set CSWAP_CACHE_DIR" in record.getMessage()
    if expected_mode is not None:
        assert mode(folder) == expected_mode


@pytest.mark.parametrize(
    "refuse",
    [
        lambda file, _: file.chmod(0o620),
        lambda file, _: file.chmod(0o602),
        lambda file, _: file.symlink_to(file.rename(file.with_name("x"))),
        pytest.param(
            give_away,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_a_file_that_others_can_write_is_replaced(folder, monkeypatch, caplog, refuse):
    fetch(EVIL)
    (file,) = folder.iterdir()
    refuse(file, monkeypatch)
    assert fetch() == (MADE, True)
    assert fetch() == (MADE, False)
    assert (mode(file), file.lstat().st_uid) == (0o600, os.geteuid())
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{file} is not used: ")


def test_a_folder_below_one_that_all_may_write_is_used(folder):
    folder.parents[1].mkdir()
    folder.parents[1].chmod(0o1777)
    fetch()
    assert fetch() == (MADE, False)


def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch, caplog):
    def replace(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    assert fetch() == (MADE, True)
    assert list(folder.iterdir()) == []
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


def test_without_any_home_nothing_is_kept(monkeypatch, caplog, tmp_path):
    def unknown(_):
        raise KeyError

    for name in ("CSWAP_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(cache_folder, "_told", set())
    monkeypatch.chdir(tmp_path)
    assert [fetch(), fetch()] == [(MADE, True)] * 2
    assert list(tmp_path.iterdir()) == []
    (record,) = caplog.records
    assert "set CSWAP_CACHE_DIR" in record.getMessage()
