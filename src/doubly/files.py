"""Files that are written whole or not at all, and what to say where one cannot be written. No torch."""

import errno
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from doubly.errors import UsageError

_STARTED = time.time()
_STALE_SECONDS = 86400  # no write lasts as long, so an older file is a leftover, whichever machine wrote it
# .NAME.PROCESS-MACHINE.unfinished.SUFFIX; earlier versions wrote .metrics.jsonl.PROCESS and .evaluation-PROCESS.npz
_UNFINISHED = re.compile(r"\..*\.(?P<pid>\d+)-(?P<machine>[0-9a-f]{8})\.unfinished(\.\w+)?")
_UNFINISHED_BEFORE = re.compile(
    r"\.\w[\w-]*\.jsonl?\.(?P<pid>\d+)|\.(evaluation|gallery|images-\d+-[\w-]+)-(?P<pid2>\d+)\.npz"
)
_CAUSES = (
    ((errno.ENOSPC,), ("the disk is full", "make room, or choose a folder on another disk")),
    ((errno.EDQUOT,), ("your quota on this disk is used up", "make room, or choose a folder on another disk")),
    (
        (errno.EFBIG,),
        (
            "the file would be larger than the limit of this shell (`ulimit -f`) or of the file system",
            "raise the limit, or choose a folder on another disk",
        ),
    ),
    ((errno.EROFS,), ("the disk is read-only", "choose a folder on another disk")),
    ((errno.EACCES, errno.EPERM), ("it may not be written", "change its permissions, or choose another folder")),
    (
        (errno.ENOENT, errno.ESTALE),
        ("its folder is gone", "do not delete or rename a folder that is in use; name one that exists"),
    ),
    (
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
        ("a file stands where a folder is needed, or the reverse", "choose another name"),
    ),
    ((errno.ENAMETOOLONG,), ("its name is too long", "choose a shorter name")),
)


class WriteError(UsageError, OSError):
    """A file could not be written; the one that it would have replaced is as it was."""


def write_error(path: Path, error: OSError) -> WriteError:
    """Return the error that says why a file could not be written and what to do.

    Args:
        path: The file.
        error: What the operating system reported.
    """
    reason = error.strerror or str(error)
    unknown = ("the system refused it", "check the disk, or choose another folder")
    cause, remedy = next((texts for numbers, texts in _CAUSES if error.errno in numbers), unknown)
    explained = WriteError(f"{path} cannot be written: {cause} ({reason}); what was there is unchanged: {remedy}")
    explained.errno = error.errno
    return explained


@contextmanager
def explained_writes(path: Path) -> Iterator[None]:
    """Turn errors of the operating system while a file or folder is written into a `WriteError` that names it."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise write_error(path, error) from None
    except Exception as error:  # safetensors has an error of its own, and gives the number only in its text
        number = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
        if number is None:
            raise
        code = int(number[1])
        raise write_error(path, OSError(code, os.strerror(code))) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces `path` when the context ends without an error.

    After a crash `path` holds either all of the old contents or all of the new. The folder must exist.

    Args:
        path: The file to replace.

    Raises:
        WriteError: If it cannot be written.
    """
    unfinished = path.with_name(f".{_short(path.stem)}.{os.getpid()}-{_machine()}.unfinished{path.suffix}")
    try:
        with explained_writes(path):
            yield unfinished
            flush(unfinished)
            os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Create a folder and those above it where they are missing.

    Raises:
        WriteError: If it cannot be created.
    """
    with explained_writes(path):
        path.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8; half a surrogate pair, from a file name, becomes a question mark."""
    write_bytes(path, text.encode("utf-8", errors="replace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Raises:
        WriteError: If it cannot be written.
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


def json_bytes(value: object, indent: int | None = None) -> bytes:
    """Return a value as JSON with an end of line.

    Raises:
        ValueError: If it contains NaN or infinity, which JSON does not have.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, from a file name, can only be written escaped
        return json.dumps(value, indent=indent, allow_nan=False).encode() + b"\n"


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically; floats keep every digit.

    Raises:
        ValueError: If the value contains NaN or infinity, which JSON does not have. The old file stays as it was.
        WriteError: If it cannot be written.
    """
    write_bytes(path, json_bytes(value, indent=2))


def write_arrays(path: Path, arrays: Mapping[str, Any], compressed: bool = False) -> None:
    """Write an .npz file atomically.

    Raises:
        WriteError: If it cannot be written.
    """
    import numpy as np

    with replacing(path) as unfinished, unfinished.open("wb") as stream:
        (np.savez_compressed if compressed else np.savez)(stream, **arrays)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed; those of processes that still run stay."""
    with suppress(OSError):  # a folder that is missing or read-only has none that could be removed
        for entry in list(os.scandir(folder)):
            if entry.name.startswith(".") and _is_leftover(entry):
                os.unlink(entry.path)


def _is_leftover(entry: "os.DirEntry[str]") -> bool:
    name = _UNFINISHED.fullmatch(entry.name) or _UNFINISHED_BEFORE.fullmatch(entry.name)
    if name is None or not entry.is_file(follow_symlinks=False):
        return False
    parts = name.groupdict()
    written = entry.stat(follow_symlinks=False).st_mtime
    if written < time.time() - _STALE_SECONDS:
        return True
    if parts.get("machine", _machine()) != _machine():
        return False
    pid = int(parts["pid"] or parts.get("pid2") or 0)
    # In a container, processes of one run after the other often have the same number.
    return written < _STARTED if pid == os.getpid() else not _is_running(pid)


def _is_running(pid: int) -> bool:
    if os.name == "nt":  # there, signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True


@cache
def _machine() -> str:
    """Return a short name of this machine: numbers of processes are its own."""
    return hashlib.sha256(socket.gethostname().encode("utf-8", "replace")).hexdigest()[:8]


def _short(stem: str) -> str:
    """Return a part of a name that leaves room for the rest: file systems allow 255 bytes."""
    return stem.encode("utf-8", "surrogateescape")[:150].decode("utf-8", "ignore")
