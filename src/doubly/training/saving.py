"""Write a run directory during training: rows of metrics and checkpoints."""

import time
from typing import Any

from doubly.checkpoints.files import find_checkpoint, save_checkpoint
from doubly.locks import DirectoryLock
from doubly.rundir import RunDir, append_metrics
from doubly.training.snapshot import make_checkpoint
from doubly.training.state import TrainState


class RunWriter:
    """Writes the files of a run; on other processes than the first, and without a directory, it writes nothing."""

    def __init__(self, rundir: RunDir | None, save_seconds: float, lock: DirectoryLock | None = None) -> None:
        """Start the clock.

        Args:
            rundir: The run directory, if there is one.
            save_seconds: Shortest time between two checkpoints.
            lock: That of the directory, on the first process.
        """
        self.rundir, self.save_seconds, self.lock = rundir, save_seconds, lock
        self.saved_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the last checkpoint is old enough for a new one."""
        return time.monotonic() - self.saved_at > self.save_seconds

    def save(self, state: TrainState, name: str = "last") -> None:
        """Write a checkpoint; collective over the processes."""
        if self.rundir is None:
            return
        checkpoint = make_checkpoint(state)
        if state.communicator.is_first:
            self._check_directory()
            save_checkpoint(self.rundir.checkpoints, name, checkpoint)
        if name == "last":
            self.saved_at = time.monotonic()

    def append(self, state: TrainState, row: dict[str, Any]) -> None:
        """Append an epoch's row to metrics.jsonl."""
        if self.rundir is not None and state.communicator.is_first:
            self._check_directory()
            append_metrics(self.rundir, row)

    def _check_directory(self) -> None:
        """Refuse to write where the run directory is no longer the one that the run began in."""
        if self.lock is not None:
            self.lock.check()

    def describe_last(self) -> str:
        """Return where the last good checkpoint is, for an error message; empty if there is none."""
        path = None if self.rundir is None else find_checkpoint(self.rundir.checkpoints, "last")
        return "" if path is None else f"; the last good checkpoint is {path}"
