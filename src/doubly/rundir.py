"""The files of a run directory: their names, and how they are written so that a crash loses nothing. No torch."""

import glob
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubly.errors import UsageError

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


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically; floats keep every digit.

    Raises:
        ValueError: If the value contains NaN or infinity, which JSON does not have. The old file stays as it was.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        _replace(path, text)
    except UnicodeEncodeError:  # half a surrogate pair, from a file name, can only be written escaped
        _replace(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        UsageError: If the file is missing, cannot be read or is not valid JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give a run directory that contains this file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give a readable file") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}): restore it, or delete it and redo that part") from None


def read_tree(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file that holds an object.

    Raises:
        UsageError: As `read_json`, and if the file holds anything but an object.
    """
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise UsageError(f"{path} holds a {type(tree).__name__}, not named fields: restore it or redo that part")
    return tree


def append_metrics(rundir: RunDir, row: Row) -> None:
    """Append a row to metrics.jsonl and wait until it is on the disk."""
    line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    with rundir.metrics.open("a", encoding="utf-8") as stream:
        stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())


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
    """Drop the rows of `epoch` and later ones, and an unfinished last line: a resumed run writes them again."""
    if path.is_file():
        rows = [row for row in read_metrics(path) if row["epoch"] < epoch]
        _replace(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Create the directory and keep other processes from training in it while the context lasts.

    The operating system releases the lock when the process ends, even after `kill -9`.

    Raises:
        UsageError: If another process holds the lock, or the directory cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(f"{path} cannot hold a run ({error.strerror}): choose another --output") from None
    try:
        if not _acquire(handle):
            holder = os.pread(handle, 20, 0).decode() if hasattr(os, "pread") else ""
            raise UsageError(
                f"{path} is in use by another run (process {holder or 'unknown'}); "
                "wait for it or choose another --output"
            )
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        os.close(handle)  # releases the lock as well


if sys.platform == "win32":
    import msvcrt

    def _acquire(handle: int) -> bool:
        os.lseek(handle, 1 << 20, os.SEEK_SET)  # a byte far behind the process id, which stays readable
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        os.lseek(handle, 0, os.SEEK_SET)
        return True

else:
    import fcntl

    def _acquire(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _replace(path: Path, text: str) -> None:
    """Replace the text of a file so that after a crash it holds either all of the old text or all of the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
