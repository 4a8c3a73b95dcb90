"""The files of a run: their names, and how they are written so that a crash loses nothing. No torch."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doubly.errors import UsageError

Row = dict[str, Any]


@dataclass(frozen=True)
class RunDir:
    """A run directory; `train` writes the first files, `evaluate` adds the last three, `report` only reads."""

    path: Path

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


def is_run(path: Path) -> bool:
    return RunDir(path).config.is_file()


def runs_in(path: Path) -> list[Path]:
    """The run itself, or the runs of a folder."""
    found = [path] if is_run(path) else sorted(filter(is_run, path.iterdir())) if path.is_dir() else []
    if not found:
        raise UsageError(f"{path} is not a run and contains none: give a directory that `doubly train` wrote")
    return found


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(path: Path, value: object) -> None:
    """Atomically; floats keep every digit. NaN and infinity are no JSON: ValueError, and the old file stays."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        _replace(path, text)
    except UnicodeEncodeError:  # half a character, from a file name: only escaped
        _replace(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: give a run directory in which it has been written") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): give a readable file") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}): restore it, or delete it and redo that part") from None


def read_tree(path: Path) -> dict[str, Any]:
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise UsageError(f"{path} holds a {type(tree).__name__}, not named fields: restore it or redo that part")
    return tree


def duration(seconds: float) -> str:
    for unit, length, until in (("s", 1, 90), ("min", 60, 5400)):
        if seconds < until:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 3600:.1f} h" if seconds < 259_200 else f"{seconds / 86_400:.0f} days"


def printable(value: object) -> str:
    """Names come from data: what would steer a terminal, or cannot be written, becomes a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def append_metrics(rundir: RunDir, row: Row) -> None:
    line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    with rundir.metrics.open("a", encoding="utf-8") as stream:
        stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())


def read_metrics(path: Path) -> list[Row]:
    """Every whole row. A last line that a crash left unfinished is passed over; a run without metrics has no rows."""
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
    """Drop the rows from `epoch` on, and an unfinished tail: a resumed run writes them again."""
    if path.is_file():
        kept = [row for row in read_metrics(path) if row["epoch"] < epoch]
        _replace(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in kept))


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Keep other runs out of the directory. The system frees the lock with its process, even after `kill -9`."""
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
        os.close(handle)  # which also gives the lock back


if sys.platform == "win32":
    import msvcrt

    def _acquire(handle: int) -> bool:
        os.lseek(handle, 1 << 20, os.SEEK_SET)  # a byte far behind the process number, which stays readable
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
    """The file holds either all of the old text or all of the new, whenever the machine stops."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
