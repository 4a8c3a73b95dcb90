"""Keep a run directory for one process, and notice when it goes away. No torch."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from doubly.errors import UsageError
from doubly.files import explained_writes, remove_leftovers


class DirectoryLock(NamedTuple):
    """A run directory that this process holds.

    Attributes:
        path: The directory.
        handle: Of its file .lock, open as long as the directory is held.
    """

    path: Path
    handle: int

    def check(self) -> None:
        """Make sure that the directory is still the one that was locked, so that nothing is written elsewhere.

        Raises:
            UsageError: If it was deleted, renamed or replaced.
        """
        try:
            is_same = os.path.samestat(os.stat(self.path / ".lock"), os.fstat(self.handle))
        except OSError:
            is_same = False
        if not is_same:
            raise UsageError(
                f"{self.path} was deleted, renamed or replaced during the run: nothing more is written there; if it "
                "has another name now, continue with --resume --output NAME"
            )


@contextmanager
def lock_directory(path: Path, lock: bool = True) -> Iterator[DirectoryLock]:
    """Create the directory and keep other processes from training in it while the context lasts.

    The operating system releases the lock when the process ends, even after `kill -9`. What a killed process left
    unfinished in the directory is removed.

    Args:
        path: The directory.
        lock: Whether to keep others out; False is for file systems without locks.

    Raises:
        UsageError: If another process holds the lock, the file system has none, or the directory cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(f"{path} cannot hold a run ({error.strerror}): choose another --output") from None
    try:
        if lock and not _acquire_or_explain(path, handle):
            holder = os.pread(handle, 20, 0).decode("ascii", "replace") if hasattr(os, "pread") else ""
            raise UsageError(
                f"{path} is in use by another run (process {holder or 'unknown'}); "
                "wait for it or choose another --output"
            )
        with explained_writes(path / ".lock"):
            os.ftruncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
        remove_leftovers(path)
        yield DirectoryLock(path, handle)
    finally:
        os.close(handle)  # releases the lock as well


def _acquire_or_explain(path: Path, handle: int) -> bool:
    try:
        return _acquire(handle)
    except OSError as error:  # ENOLCK, EINVAL, ENOTSUP, ENOSYS, …
        raise UsageError(
            f"{path} lies on a file system without locks ({error.strerror}), so nothing would keep a second run from "
            "writing there too: choose an --output on a local disk, or use `doubly train --no-lock`, and start no "
            "second run there"
        ) from None


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
