"""Kill this process at the n-th change of a file: an open for writing, a rename, a removal, a flush, …"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Faults:
    """Counts changes of files, and sends a signal to this process before one of them. It cannot be switched off."""

    def __init__(self, at: int, number: int) -> None:
        """Begin to count.

        Args:
            at: The change before which the signal is sent, from 1; 0 is never.
            number: The signal.
        """
        self.at, self.number, self.count = at, number, 0
        self.flush = os.fsync
        os.fsync = self._fsync
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
        if writes or event in CHANGES:
            self._change()

    def _fsync(self, handle: Any) -> None:
        self._change()
        self.flush(handle)

    def _change(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), self.number)


def run_armed(words: Sequence[object], at: int, number: int, counted: Path | None = None) -> int:
    """Call `doubly` in this process, which a signal ends at a change of a file.

    Args:
        words: The command line.
        at: The change, from 1; 0 is never.
        number: The signal.
        counted: File for the number of changes, if the call comes to its end.
    """
    from doubly.cli import main

    faults = Faults(at, number)
    code = main([str(word) for word in words])
    if counted is not None:
        counted.write_text(str(faults.count))
    return code
