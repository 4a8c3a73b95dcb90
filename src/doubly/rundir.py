"""The files of a run directory: their names, and how they are written so that a crash loses nothing. No torch."""

import errno
import glob
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubly.errors import UsageError
from doubly.files import explained_writes, json_bytes, write_bytes
from doubly.files import write_json as write_json
from doubly.reading import parse_json
from doubly.reading import read_json as read_json
from doubly.reading import read_tree as read_tree

Row = dict[str, Any]


@dataclass(frozen=True)
class RunDir:
    """A run directory. `train` writes the first four entries, `evaluate` three, `frontier` two, `repair` the last."""

    path: Path

    # Each property is the path of one file or folder, which need not exist yet.

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def predictions(self) -> Path:
        return self.path / "evaluation.npz"

    @property
    def gallery(self) -> Path:
        return self.path / "gallery.npz"

    @property
    def frontier(self) -> Path:
        return self.path / "frontier.json"

    @property
    def validation_frontier(self) -> Path:  # a file of its own: reports show test images
        return self.path / "frontier-validation.json"

    @property
    def repair(self) -> Path:
        return self.path / "repair.json"


def is_run(path: Path) -> bool:
    """Return True for a run directory, which is a folder with a config.json."""
    return RunDir(path).config.is_file()


def is_result(path: Path) -> bool:
    """Return True for a run directory, and for a folder with an evaluation of a network from elsewhere."""
    return is_run(path) or RunDir(path).evaluation.is_file()


def named_runs(path: Path) -> list[Path]:
    """Return the run directories that `doubly train` gave this name: runs/NAME-s0, …; the path itself if it exists."""
    is_name = len(path.parts) == 1 and path.name != ".." and not path.exists()
    return (sorted(Path("runs").glob(f"{glob.escape(path.name)}-s[0-9]*")) if is_name else []) or [path]


def runs_in(path: Path, is_wanted: Callable[[Path], bool] = is_run) -> list[Path]:
    """Return the run directories at a path.

    Args:
        path: A run directory, a folder of run directories, or the name of a run in the folder runs.
        is_wanted: Which folders count.

    Returns:
        The path itself if it is a run directory, else the run directories in it, sorted by name.

    Raises:
        UsageError: If there is none.
    """
    runs: list[Path] = []
    for folder in named_runs(path):
        inside = sorted(filter(is_wanted, folder.iterdir())) if folder.is_dir() else []
        runs += [folder] if is_wanted(folder) else inside
    if not runs:
        raise UsageError(f"{path} is not a run and contains none: give a directory that `doubly train` wrote")
    return runs


def sha256(file: Path) -> str:
    """Return the SHA-256 checksum of a file in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def append_metrics(rundir: RunDir, row: Row) -> None:
    """Append a row to metrics.jsonl and wait until it is on the disk.

    Raises:
        WriteError: If it cannot be written; the file then ends with the row before it.
    """
    line = json_bytes(row)
    with explained_writes(rundir.metrics), rundir.metrics.open("ab", buffering=0) as stream:
        complete = stream.tell()
        try:
            if stream.write(line) < len(line):  # the disk had room for a part of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(stream.fileno())
        except OSError:
            stream.truncate(complete)
            raise


def read_metrics(path: Path) -> list[Row]:
    """Return all complete rows of a metrics.jsonl; none if the file does not exist.

    A crash can leave the last line unfinished, so a last line that cannot be read is skipped.

    Raises:
        UsageError: If any line but the last is not a JSON object.
    """
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines()
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise UsageError(f"{path}, line {number} is not a row of metrics: repair or remove that line")
    return rows


def truncate_metrics(path: Path, epoch: int) -> None:
    """Drop the rows of `epoch` and later ones, and an unfinished last line: a resumed run writes them again.

    Raises:
        UsageError: If a row cannot be read or does not give its epoch.
    """
    if path.is_file():
        rows = read_metrics(path)
        for number, row in enumerate(rows, start=1):
            if type(row.get("epoch")) is not int:
                raise UsageError(f"{path}, line {number} does not give its epoch: repair or remove that line")
        try:
            lines = [json_bytes(row) for row in rows if row["epoch"] < epoch]
        except ValueError:
            raise UsageError(f"{path} holds NaN or infinity, which no run writes: repair or remove that line") from None
        write_bytes(path, b"".join(lines))


def _row(line: bytes) -> Row | None:
    try:
        row = parse_json(line, any_number=True)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
