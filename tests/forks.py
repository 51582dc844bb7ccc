"""Forks processes that have imported torch and cswap already. Run by the fixture `forked`.

Each line of the input is a list of jobs in JSON: the Python text that becomes `__main__`, its
arguments, and files for what it writes. The answers are the processes' ids, and then, once all of
them have ended, their exit codes. A child becomes a program like any other: it ends as Python ends.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path

import torch

import cswap.api
import cswap.codecs.tiled
import cswap.engine.engine  # noqa: F401 what every job needs


def become(job):
    """Give this child the job's files and arguments."""
    null = os.open(os.devnull, os.O_RDONLY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, opened in enumerate([null, *(os.open(f, flags) for f in job["files"])]):
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(job["environment"])
    if "OMP_NUM_THREADS" in os.environ:  # which torch has read already
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv = ["-c", *job["arguments"]]
    warnings.simplefilter("ignore")


def answer(numbers):
    """Tell the tests."""
    sys.stdout.write(json.dumps(numbers) + "\n")
    sys.stdout.flush()


def next_program():
    """Serve jobs; the text of the program, in a child that is to run it."""
    # Not this folder, whose subfolders have names of packages, but the root, where bench is.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    gc.freeze()  # collections look only at what a program makes, and copy no memory of this process
    while line := sys.stdin.readline():
        pids = []
        for job in json.loads(line):
            pid = os.fork()
            if pid == 0:
                become(job)
                return job["program"]
            pids.append(pid)
        answer(pids)
        for pid in pids:  # until all have ended, their numbers stay theirs: one may be killed
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        answer([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
    return ""


if __name__ == "__main__":
    exec(compile(next_program(), "<program>", "exec", dont_inherit=True))
