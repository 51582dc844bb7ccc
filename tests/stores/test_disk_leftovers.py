"""Which folders a new store removes, and which only look as if their owner were dead."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time

import pytest
import torch

from cswap.stores import folder as folders
from cswap.stores import leftovers
from cswap.stores.disk import DiskStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def written(store, value):
    file = store.write(torch.full((60,), value, dtype=torch.uint8))
    assert file is not None
    return file


def read(store, file):
    """The value that a file was filled with."""
    out = torch.zeros(60, dtype=torch.uint8)
    store.read(file, out)
    assert torch.equal(out, out[0].expand(60))
    return int(out[0])


@pytest.fixture
def dead(tmp_path):
    """The folder of a process that ended without removing it, with three files."""
    pid = os.fork()
    if pid == 0:
        try:
            store = DiskStore(tmp_path, None)
            _files = [written(store, i) for i in range(3)]
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    (path,) = tmp_path.iterdir()
    assert len(list(path.iterdir())) == 3
    return path


def same_files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


def kept(parent, path):
    """Whether a new store leaves a folder as it is."""
    before = same_files(path)
    DiskStore(parent, None).close()
    return path.exists() and same_files(path) == before


def test_a_folder_whose_lock_is_held_stays(tmp_path, dead):
    folder = folders.open_folder(dead)
    assert folders.try_lock(folder)
    assert kept(tmp_path, dead)
    os.close(folder)
    assert not kept(tmp_path, dead)


def test_another_users_folder_stays(tmp_path, dead, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert kept(tmp_path, dead)


def test_a_folder_that_others_may_write_to_stays(tmp_path, dead):
    dead.chmod(0o770)
    assert kept(tmp_path, dead)


def test_a_symbolic_link_is_not_followed(tmp_path, dead):
    target = tmp_path / "elsewhere"
    dead.rename(target)
    dead.symlink_to(target)
    assert kept(tmp_path, target)
    assert dead.is_symlink()


def test_a_folder_of_another_machine_stays(tmp_path, dead):
    cswap_, pid, _host, _boot, rest = dead.name.split("-")
    elsewhere = dead.rename(tmp_path / "-".join([cswap_, pid, "00000000", "00000000", rest]))
    assert kept(tmp_path, elsewhere)


@pytest.mark.parametrize("same", ["host", "boot"])
def test_a_folder_of_this_machine_goes(tmp_path, dead, same):
    cswap_, pid, host, boot, rest = dead.name.split("-")
    ids = [host, "00000000"] if same == "host" else ["00000000", boot]
    assert not kept(tmp_path, dead.rename(tmp_path / "-".join([cswap_, pid, *ids, rest])))


@pytest.mark.parametrize("name", ["cswap-x7_k2abc", "cswap-tests-abcdefgh", "mine"])
def test_a_folder_of_another_name_stays(tmp_path, dead, name):
    assert kept(tmp_path, dead.rename(tmp_path / name))


def test_what_we_have_not_written_stays(tmp_path, dead):
    (dead / "notes.txt").write_text("mine")
    DiskStore(tmp_path, None).close()
    assert sorted(p.name for p in dead.iterdir()) == ["notes.txt"]


def test_a_folder_in_the_making_stays_for_an_hour(tmp_path, dead):
    for path in dead.iterdir():
        path.unlink()
    hidden = dead.rename(tmp_path / f".{dead.name}")
    assert kept(tmp_path, hidden)
    then = time.time() - leftovers.UNFINISHED_S - 1
    os.utime(hidden, (then, then))
    assert not kept(tmp_path, hidden)


def test_a_folder_is_locked_before_it_has_its_name(tmp_path, monkeypatch):
    seen: list[str] = []

    def look(folder):
        leftovers.remove_leftovers(tmp_path)  # as another process may, right now
        seen.extend(p.name[:7] for p in tmp_path.iterdir())
        return try_lock(folder)

    try_lock = folders.try_lock
    monkeypatch.setattr(folders, "try_lock", look)
    store = DiskStore(tmp_path, None)
    assert seen == [".cswap-"]
    assert leftovers.remove_leftovers(tmp_path) == 0
    store.close()


def test_two_stores_that_are_made_at_once_remove_no_folder_of_each_other(tmp_path):
    stores: list[DiskStore] = []

    def make():
        stores.extend(DiskStore(tmp_path, None) for _ in range(20))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = [written(store, i) for i, store in enumerate(stores)]
    assert [read(s, f) for s, f in zip(stores, files, strict=True)] == list(range(80))
    for store in stores:
        store.close()


@pytest.mark.parametrize("locks_come", [False, True])
def test_a_folder_that_cannot_be_locked_is_no_leftover(tmp_path, monkeypatch, locks_come):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    store = DiskStore(tmp_path, None)
    file = written(store, 1)
    if locks_come:
        monkeypatch.undo()
    assert leftovers.remove_leftovers(tmp_path) == 0
    assert read(store, file) == 1
    store.release(file)
    store.close()
    assert list(tmp_path.iterdir()) == []
