"""The disk tier: one file without a name."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import cswap
from cswap.errors import CorruptEncodingError
from cswap.stores.disk import DiskFile, DiskStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

NBYTES = 60
CHILD_ENDS_WITHIN_S = 20
ALL: dict[str, Any] = {"codec": "raw", "min_bytes": 0, "host_limit": 0}

# A process of its own needs no torch: a store asks a payload for its bytes only.
PROGRAM = """
import os, sys, time
from pathlib import Path
import numpy as np
from cswap.stores.disk import DiskStore

class Payload:
    def __init__(self, values): self.values = values
    def numel(self): return self.values.size
    def numpy(self): return self.values

store = DiskStore(Path(sys.argv[1]))
files = [store.write(Payload(np.full(60, i, np.uint8))) for i in range(3)]
print("ready", flush=True)
time.sleep(600)
"""


def payload(value, nbytes=NBYTES):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def written(store, value, nbytes=NBYTES):
    file = store.write(payload(value, nbytes))
    assert file is not None
    return file


def read(store, file):
    out = torch.zeros(file.nbytes, dtype=torch.uint8)
    store.read(file, out)
    return out


def size_of(store):
    """Bytes of the store's file; None: it has none."""
    return None if store._spill is None else os.fstat(store._spill.descriptor).st_size


def open_files():
    """Descriptors of this process that belong to files without a name."""
    links = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    return [link for link in links if link.endswith(" (deleted)")]


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


@pytest.fixture
def disk(tmp_path):
    return DiskStore(tmp_path)


def test_what_is_written_comes_back_and_has_no_name(disk, tmp_path):
    file = disk.write(torch.arange(60, dtype=torch.uint8))
    assert torch.equal(read(disk, file), torch.arange(60, dtype=torch.uint8))
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(os.fstat(file.spill.descriptor).st_mode) == 0o600
    assert (disk.in_use_bytes, size_of(disk)) == (60, 60)
    disk.release(file)
    disk.release(file)  # a second time does nothing
    assert (disk.in_use_bytes, disk.peak_bytes, size_of(disk)) == (0, 60, 0)


def test_gaps_are_filled(disk):
    files = [written(disk, i, nbytes) for i, nbytes in enumerate((30, 40, 30))]
    disk.release(files[0])
    disk.release(files[2])
    assert [written(disk, i, nbytes).offset for i, nbytes in ((5, 30), (6, 30))] == [0, 70]
    assert (read(disk, files[1]) == 1).all()
    assert size_of(disk) == disk.in_use_bytes == 100


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 99)), max_size=60))
@example([(True, 50, 0), (True, 0, 0), (True, 9, 0)])  # one without bytes has no place of its own
@example([(True, 50, 0), (True, 50, 0), (False, 0, 0), (True, 30, 0), (True, 20, 0)])
def test_encodings_never_overlap_and_the_file_ends_with_the_last(moves):
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(Path(folder))
        live: list[tuple[int, DiskFile]] = []
        for n, (writing, nbytes, which) in enumerate(moves):
            if writing or not live:
                live.append((n, written(store, n, nbytes)))
            else:
                store.release(live.pop(which % len(live))[1])
            for value, file in live:
                assert (read(store, file) == value).all()
            assert store.in_use_bytes == sum(file.nbytes for _, file in live)
            assert size_of(store) == max((file.end for _, file in live if file.nbytes), default=0)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_bytes_that_are_not_what_was_written_are_refused(disk, tmp_path, damage):
    file = written(disk, 1)
    if damage == "flip":
        os.pwrite(file.spill.descriptor, b"\5", 30)
    else:
        os.ftruncate(file.spill.descriptor, 59 if damage == "cut" else 0)
    with pytest.raises(CorruptEncodingError, match=f"{tmp_path}.*content was changed"):
        read(disk, file)


def test_a_write_that_fails_leaves_nothing_behind(disk, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match="No space"):
        written(disk, 1)
    assert (disk.in_use_bytes, size_of(disk)) == (0, 0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_is_full_halfway_leaves_nothing_behind(disk, monkeypatch, number):
    write, calls = os.pwrite, []

    def half(descriptor, data, offset):
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))
        return write(descriptor, data[: len(data) // 2], offset)

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match=os.strerror(number)):
        written(disk, 1)
    monkeypatch.undo()
    assert calls == [60, 30]
    assert (disk.in_use_bytes, size_of(disk)) == (0, 0)
    assert written(disk, 2, 100).offset == 0


def test_pieces_that_are_written_and_read_are_a_whole(disk, monkeypatch):
    write, take, x = os.pwrite, os.preadv, torch.arange(60, dtype=torch.uint8)
    monkeypatch.setattr(os, "pwrite", lambda to, data, at: write(to, data[:7], at))
    monkeypatch.setattr(os, "preadv", lambda of, into, at: take(of, [into[0][:11]], at))
    assert torch.equal(read(disk, disk.write(x)), x)


def test_a_disk_that_takes_nothing_is_not_asked_for_ever(disk, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="nothing was written"):
        written(disk, 1)
    assert disk.in_use_bytes == 0


def test_a_disk_that_cannot_be_read_is_said_to_be(disk, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = written(disk, 1)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CorruptEncodingError, match=f"{tmp_path}.*Input/output error"):
        read(disk, file)


def test_a_disk_that_cannot_be_cut_costs_no_step(disk, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = written(disk, 1)
    monkeypatch.setattr(os, "ftruncate", fail)
    disk.release(file)
    assert disk.in_use_bytes == 0
    assert (read(disk, written(disk, 2)) == 2).all()


# A forked child, a killed process.


def test_a_forked_child_has_a_file_of_its_own_and_leaves_its_parents_alone(tmp_path):
    store = DiskStore(tmp_path)
    before = written(store, 1)
    go, ready = os.pipe()

    def work():
        os.read(go, 1)
        assert (read(store, before) == 1).all()
        mine = [written(store, value) for value in (7, 8)]
        assert [int(read(store, file)[0]) for file in mine] == [7, 8]
        assert store.in_use_bytes == 2 * NBYTES
        for file in (before, *mine):
            store.release(file)
        assert store.in_use_bytes == 0
        store.close()
        gc.collect()

    wait = in_child(work)
    after = written(store, 2)  # both write their second encoding now
    os.write(ready, b".")
    assert wait() == 0
    os.close(go)
    os.close(ready)
    assert [int(read(store, file)[0]) for file in (before, after)] == [1, 2]
    assert store.in_use_bytes == size_of(store) == 2 * NBYTES


def test_a_child_does_not_decode_what_its_parent_has_released(tmp_path):
    store = DiskStore(tmp_path)
    file = written(store, 1)
    go, ready = os.pipe()

    def work():
        os.read(go, 1)
        with pytest.raises(CorruptEncodingError, match="content was changed"):
            read(store, file)

    wait = in_child(work)
    store.release(file)
    written(store, 2)  # in its place
    os.write(ready, b".")
    assert wait() == 0
    os.close(go)
    os.close(ready)


def test_a_lock_that_is_held_during_a_fork_does_not_stop_the_child(disk):
    with disk._lock:
        assert in_child(lambda: disk.release(written(disk, 3)))() == 0


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_nothing(tmp_path, with_signal):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(with_signal)
    process.stdout.close()
    assert process.wait(CHILD_ENDS_WITHIN_S) == -with_signal
    assert list(tmp_path.iterdir()) == []


# A store that is closed, or that nobody has any more.


def test_a_closed_store_keeps_what_is_in_use(tmp_path):
    store = DiskStore(tmp_path)
    files = [written(store, i) for i in range(2)]
    store.close()
    assert [int(read(store, f)[0]) for f in files] == [0, 1]
    store.release(files[0])
    assert size_of(store) == 2 * NBYTES
    store.release(files[1])
    assert size_of(store) is None
    late = written(store, 9)  # of a job that was under way
    assert (read(store, late) == 9).all()
    store.release(late)
    assert (size_of(store), store.in_use_bytes) == (None, 0)


def test_sixty_installs_leave_no_file_open(tmp_path):
    net = nn.ReLU()
    x = torch.linspace(0, 1, 1000, requires_grad=True)
    before = len(open_files())
    for _ in range(60):
        handle = cswap.install(net, spill_dir=tmp_path, **ALL)
        loss = net(x).square().sum()
        handle.engine.synchronize()
        assert handle.stats.disk_bytes > 0
        handle.remove()
        del loss, handle  # backward never comes
    gc.collect()
    assert len(open_files()) <= before + 1
    assert list(tmp_path.iterdir()) == []


def test_a_graph_made_before_remove_reads_its_encodings(tmp_path):
    x = torch.linspace(0, 1, 10_000, requires_grad=True)
    net = nn.ReLU()
    handle = cswap.install(net, spill_dir=tmp_path, **ALL)
    loss = net(x).sum()
    handle.engine.synchronize()
    handle.remove()
    disk = handle.engine._state.disk
    assert disk is not None
    disk.close()
    assert size_of(disk)
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x > 0).float())
    del loss
    assert handle.stats.disk_bytes == 0
    assert size_of(disk) is None
