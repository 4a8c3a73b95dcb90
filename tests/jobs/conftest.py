"""Small runs on digits, and what the tests of jobs compare and do to them."""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from doubly.checkpoints import load_checkpoint
from doubly.config.run import Run
from doubly.config.serialize import from_json
from doubly.rundir import read_metrics

SMALL = {
    "kind": "run",
    "data": {"kind": "data", "source": {"kind": "dataset.digits"}},
    "model": {"kind": "model.small_cnn", "width": 2},
    "method": {"kind": "method.standard"},
    "validation": {"kind": "validation", "every": 2, "size": 20, "attack": {"kind": "attack.pgd", "steps": 1}},
    "epochs": 2,
    "batch_size": 512,
    "device": "cpu",
    "channels_last": "no",
}


@pytest.fixture(scope="session")
def small_run():
    """A run of a second; fields of its JSON form can be changed."""

    def make(**changes) -> Run:
        return from_json({**SMALL, **changes})

    return make


class SavedRun:
    """The contents of a run directory, without what differs between two equal runs."""

    def __init__(self, path: Path) -> None:
        tensors, self.info = load_checkpoint(path / "checkpoints" / "last")
        self.tensors = {f"{group}/{name}": value for group, part in tensors.items() for name, value in part.items()}
        self.rows = [
            {key: value for key, value in row.items() if key not in ("seconds", "peak_memory")}
            for row in read_metrics(path / "metrics.jsonl")
        ]

    def __eq__(self, other):
        same_names = self.tensors.keys() == other.tensors.keys()
        same_values = all(torch.equal(value, other.tensors[name]) for name, value in self.tensors.items())
        return same_names and same_values and self.rows == other.rows


@pytest.fixture(scope="session")
def saved_run():
    return SavedRun


@pytest.fixture(scope="session")
def killed_after_epoch():
    """Kill -9 the process that trains in a run directory, once its checkpoint has reached an epoch."""

    @contextmanager
    def kill_inside(output: Path, epoch: int):
        killed: list[int] = []

        def kill() -> None:
            state, deadline = output / "checkpoints" / "last" / "state.json", time.monotonic() + 600
            while time.monotonic() < deadline:
                try:
                    if json.loads(state.read_text())["epoch"] >= epoch:
                        pid = int((output / ".lock").read_text())
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)
                        return
                except ProcessLookupError:  # it has ended, so that the test fails below
                    return
                except (FileNotFoundError, ValueError):  # not started, or between two renames
                    pass
                time.sleep(0.002)

        killer = threading.Thread(target=kill)
        killer.start()
        yield
        killer.join()
        assert killed and killed[0] != os.getpid()

    return kill_inside
