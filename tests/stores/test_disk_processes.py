"""The disk tier among processes: forked ones, killed ones, and those that live side by side."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap.stores import leftovers
from cswap.stores.disk import DiskStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

NBYTES = 60
CHILD_ENDS_WITHIN_S = 20
ALL: dict[str, Any] = {"codec": "raw", "min_bytes": 0, "host_limit": 0}

# Processes of their own need no torch: a store asks a payload for its bytes only.
PROGRAM = """
import os, sys, time
from pathlib import Path
import numpy as np
from cswap.stores.disk import DiskStore

class Payload:
    def __init__(self, values): self.values = values
    def numel(self): return self.values.size
    def numpy(self): return self.values

parent = Path(sys.argv[1])
store = DiskStore(parent, None)
files = [store.write(Payload(np.full(60, i, np.uint8))) for i in range(3)]
"""


def payload(value):
    return torch.full((NBYTES,), value, dtype=torch.uint8)


def written(store, value):
    file = store.write(payload(value))
    assert file is not None
    return file


def read(store, file):
    out = torch.zeros(NBYTES, dtype=torch.uint8)
    store.read(file, out)
    return out


def listing(parent):
    return sorted(p.name for p in parent.rglob("*") if p.name.endswith(".enc"))


def fail(number):
    def raise_error(*_, **__):
        raise OSError(number, os.strerror(number))

    return raise_error


def in_child(work):
    """Start ``work`` in a forked child; returns a function that waits for its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(CHILD_ENDS_WITHIN_S)  # a child that waits for a lock is killed
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start(parent, body="print('ready', flush=True); time.sleep(600)"):
    """A process with a store and three files in it; once it is ready."""
    command = [sys.executable, "-c", PROGRAM + body, str(parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process, with_signal=None):
    if with_signal is not None:
        process.send_signal(with_signal)
    process.stdout.close()
    return process.wait(CHILD_ENDS_WITHIN_S)


@pytest.fixture
def disk(tmp_path):
    store = DiskStore(tmp_path, None)
    yield store
    store.close()


# A forked child.


def test_a_forked_child_has_files_of_its_own_and_leaves_its_parents_alone(disk):
    before = written(disk, 1)
    go, ready = os.pipe()

    def work():
        os.read(go, 1)
        assert torch.equal(read(disk, before), payload(1))
        mine = [written(disk, value) for value in (7, 8)]
        assert [read(disk, file)[0] for file in mine] == [7, 8]
        assert disk.in_use_bytes == 2 * NBYTES
        assert not {f.path.parent for f in mine} & {before.path.parent}
        assert all(f.path.name.startswith(f"{os.getpid()}-") for f in mine)
        for file in (before, *mine):
            disk.release(file)
        assert disk.in_use_bytes == 0
        disk.close()
        assert not mine[0].path.parent.exists()

    wait = in_child(work)
    after = written(disk, 2)  # both write their second file now
    os.write(ready, b".")
    assert wait() == 0
    os.close(go)
    os.close(ready)
    assert [torch.equal(read(disk, f), payload(i)) for i, f in ((1, before), (2, after))] == [
        True
    ] * 2
    assert disk.in_use_bytes == 2 * NBYTES


def test_a_file_of_that_name_that_was_there_before_is_not_deleted(disk):
    first = written(disk, 1)
    name = first.path.name.replace("00000001", "00000002")
    other = first.path.with_name(name)
    other.write_bytes(b"somebody else's")
    with pytest.raises(FileExistsError):
        written(disk, 2)
    assert other.read_bytes() == b"somebody else's"
    assert disk.in_use_bytes == NBYTES


def test_a_lock_that_is_held_during_a_fork_does_not_stop_the_child(disk):
    with disk._lock:
        wait = in_child(lambda: disk.release(written(disk, 3)))
        assert wait() == 0


def test_a_child_that_lets_go_of_a_store_deletes_nothing(tmp_path):
    store = DiskStore(tmp_path, None)
    file = written(store, 1)

    def work():
        nonlocal store
        del store
        gc.collect()

    assert in_child(work)() == 0
    assert torch.equal(read(store, file), payload(1))


@pytest.mark.parametrize("closes", [False, True])
def test_a_child_that_exits_deletes_its_own_files_only(tmp_path, closes):
    body = f"""
pid = os.fork()
if pid == 0:
    own = store.write(Payload(np.zeros(9, np.uint8)))
    if {closes}:
        store.close()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert all(f.path.exists() for f in files)
print("ready", flush=True)
assert list(parent.iterdir()) == [files[0].path.parent]
sys.stdin.read()
"""
    process = start(tmp_path, body)
    assert end(process) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_child_of_multiprocessing_removes_its_folder(tmp_path):
    body = """
import multiprocessing
def work():
    kept.append(store.write(Payload(np.zeros(9, np.uint8))))
kept = []
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
assert child.exitcode == 0
assert list(parent.iterdir()) == [files[0].path.parent]
assert all(f.path.exists() for f in files)
print("ready", flush=True)
"""
    assert end(start(tmp_path, body)) == 0
    assert list(tmp_path.iterdir()) == []


# A killed process.


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_store_removes_the_folder_of_a_killed_process(tmp_path, with_signal):
    process = start(tmp_path)
    living = DiskStore(tmp_path, None)
    file = written(living, 1)
    assert len(list(tmp_path.iterdir())) == 2  # neither has removed the other's
    assert end(process, with_signal) == -with_signal
    assert len(listing(tmp_path)) == 4
    other = DiskStore(tmp_path, None)
    assert listing(tmp_path) == [file.path.name]
    assert torch.equal(read(living, file), payload(1))
    for store in (living, other):
        store.release(file)
        store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_leaves_nothing(tmp_path):
    assert end(start(tmp_path, "print('ready', flush=True)")) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_dead_process_with_a_living_child_keeps_its_folder(tmp_path):
    body = """
if os.fork() == 0:
    sys.stdin.read()  # until the test closes it
    os._exit(0)
print("ready", flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", PROGRAM + body, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    assert leftovers.remove_leftovers(tmp_path) == 0
    assert len(listing(tmp_path)) == 3
    process.stdin.close()
    assert process.stdout.read() == ""  # the child has closed it by ending
    process.stdout.close()
    deadline = time.monotonic() + CHILD_ENDS_WITHIN_S
    while not leftovers.remove_leftovers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.001)  # it closes one file after the other
    assert list(tmp_path.iterdir()) == []


# A store that is closed, or that nobody has any more.


def test_a_closed_store_keeps_the_files_that_are_in_use(tmp_path):
    store = DiskStore(tmp_path, None)
    files = [written(store, i) for i in range(2)]
    store.close()
    assert [int(read(store, f)[0]) for f in files] == [0, 1]
    store.release(files[0])
    assert listing(tmp_path) == [files[1].path.name]
    store.release(files[1])
    assert list(tmp_path.iterdir()) == []
    late = written(store, 9)  # of a job that was under way
    assert torch.equal(read(store, late), payload(9))
    store.release(late)
    store.close()
    assert list(tmp_path.iterdir()) == []
    assert store.in_use_bytes == 0


def test_a_store_that_nobody_has_is_removed_with_its_files(tmp_path):
    store = DiskStore(tmp_path, None)
    written(store, 1)
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_releasing_twice_counts_once(disk):
    files = [written(disk, i) for i in range(2)]
    disk.release(files[0])
    disk.release(files[0])
    assert disk.in_use_bytes == NBYTES


def test_sixty_installs_leave_no_folder(tmp_path):
    net = nn.ReLU()
    x = torch.linspace(0, 1, 1000, requires_grad=True)
    for _ in range(60):
        handle = cswap.install(net, spill_dir=tmp_path, **ALL)
        loss = net(x).square().sum()
        assert handle.stats.disk_bytes > 0
        handle.remove()
        del loss, handle  # backward never comes
    gc.collect()
    ends = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < ends:  # another thread is collecting
        time.sleep(0.05)
        gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_graph_made_before_remove_reads_its_files(tmp_path):
    x = torch.linspace(0, 1, 10_000, requires_grad=True)
    net = nn.ReLU()
    handle = cswap.install(net, spill_dir=tmp_path, **ALL)
    loss = net(x).sum()
    handle.remove()
    disk = handle.engine._state.disk
    assert disk is not None
    disk.close()
    assert listing(tmp_path)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x > 0).float())
    del loss
    assert handle.stats.disk_bytes == 0
    assert list(tmp_path.iterdir()) == []


# Files that cannot be deleted.


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
def test_a_file_that_cannot_be_deleted_is_counted_and_training_goes_on(
    tmp_path, monkeypatch, caplog, number
):
    x = torch.linspace(-1, 1, 10_000, requires_grad=True)
    with cswap.swapping(spill_dir=tmp_path, **ALL) as engine:
        loss = (x.clone() ** 2).sum()
        on_disk = engine.stats.disk_bytes
        monkeypatch.setattr(os, "unlink", fail(number))
        loss.backward()
        del loss
        stats = engine.stats
        left = listing(tmp_path)
        monkeypatch.undo()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach())
    assert stats.fallbacks_by_reason == {"disk:delete": len(left)}
    assert stats.disk_bytes == on_disk > 0
    assert f"disk:delete failed ([Errno {number}]" in caplog.text


def test_files_that_could_not_be_deleted_go_later(tmp_path, monkeypatch):
    failures = []
    store = DiskStore(tmp_path, None, lambda *failure: failures.append(failure))
    files = [written(store, i) for i in range(3)]
    monkeypatch.setattr(os, "unlink", fail(errno.EIO))
    store.release(files[0])
    store.release(files[0])
    monkeypatch.undo()
    assert [(what, why.errno) for what, why in failures] == [("disk:delete", errno.EIO)]
    assert store.in_use_bytes == 3 * NBYTES
    store.release(files[1])
    assert store.in_use_bytes == NBYTES
    assert listing(tmp_path) == [files[2].path.name]
    monkeypatch.setattr(os, "unlink", fail(errno.EIO))
    store.release(files[2])
    monkeypatch.undo()
    store.close()
    assert store.in_use_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_removed_is_reported_and_goes_next_time(tmp_path, monkeypatch):
    failures = []
    store = DiskStore(tmp_path, None, lambda *failure: failures.append(failure))
    file = written(store, 1)
    monkeypatch.setattr(os, "unlink", fail(errno.EROFS))
    store.release(file)
    store.close()
    monkeypatch.undo()
    assert [what for what, _ in failures] == ["disk:delete"] * 2
    assert store.in_use_bytes == NBYTES  # they are still there
    DiskStore(tmp_path, None).close()
    assert list(tmp_path.iterdir()) == []
