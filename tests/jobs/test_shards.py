"""Shards of AutoAttack as processes, with a stand-in for `python -m doubly evaluate`."""

import os
import sys

import pytest

from doubly.errors import UsageError
from doubly.jobs import shards
from doubly.jobs.shards import run_shards

PROGRAM = """#!/bin/bash
echo "$* with $OMP_NUM_THREADS threads" >&2
{rest}
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Let processes run these lines of bash."""
    monkeypatch.setattr(shards, "core_count", lambda: 4)

    def write(rest):
        path = tmp_path / "python"
        path.write_text(PROGRAM.format(rest=rest))
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


def test_each_shard_is_a_process_with_its_share_of_the_cores(program):
    program("exit 0")
    messages = []
    run_shards(["runs/at", "--autoattack"], 2, messages.append)
    arguments = "-m doubly evaluate runs/at --autoattack --shard"
    assert sorted(messages) == [f"{arguments} {shard} 2 with 2 threads" for shard in (0, 1)]


def test_the_error_of_a_process_is_raised(program):
    program('echo "doubly: there is no such run" >&2; exit 2')
    with pytest.raises(UsageError, match=r"^there is no such run$"):
        run_shards([], 2, lambda message: None)
    program("exit 1")
    with pytest.raises(UsageError, match="the same command continues"):
        run_shards([], 1, lambda message: None)


def test_an_exception_ends_the_processes(program, tmp_path, monkeypatch):
    """Each writes its number into a pipe when it has started, and sleeps as nothing but a signal could end it."""
    os.mkfifo(tmp_path / "started")
    program(f'echo "$$" > "{tmp_path}/started"; exec sleep 1000')
    wait = shards.subprocess.Popen.wait
    pids = []

    def interrupted_wait(process, *arguments):
        if not pids:
            while len(pids) < 2:
                with open(tmp_path / "started") as stream:
                    pids.extend(int(line) for line in stream)
            raise KeyboardInterrupt
        return wait(process, *arguments)

    monkeypatch.setattr(shards.subprocess.Popen, "wait", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        run_shards([], 2, lambda message: None)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
