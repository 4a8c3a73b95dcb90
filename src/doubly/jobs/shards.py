"""AutoAttack's chunks divided among processes of this machine."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

from doubly.errors import UsageError
from doubly.jobs.pool import core_count
from doubly.jobs.signals import deferred_signals

ERROR_PREFIX = "doubly: "  # of the line in which the command line reports an error


def run_shards(words: Sequence[str], shards: int, on_message: Callable[[str], None]) -> None:
    """Let each process do its part of AutoAttack's chunks; they share the cores, and save what they find.

    Args:
        words: The arguments of `doubly evaluate`, without --jobs.
        shards: Number of processes.
        on_message: Called with each line that a process prints, except for errors.

    Raises:
        UsageError: If a process failed, with its message.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, core_count() // shards))}
    command = [sys.executable, "-m", "doubly", "evaluate", *words, "--shard"]
    errors: list[str] = []

    def relay(lines: Iterable[str]) -> None:
        for line in lines:
            if line.startswith(ERROR_PREFIX):
                errors.append(line.removeprefix(ERROR_PREFIX).strip())
            else:
                on_message(line.rstrip("\n"))

    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        with deferred_signals():  # else a signal could leave a process running
            for shard in range(shards):
                process = subprocess.Popen(  # noqa: S603 - our own command
                    [*command, str(shard), str(shards)],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                )
                processes.append(process)
                readers.append(threading.Thread(target=relay, args=(process.stderr,), daemon=True))
                readers[-1].start()
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process, reader in zip(processes, readers, strict=True):
            process.wait()
            reader.join()
            if process.stderr is not None:
                process.stderr.close()
    if any(codes):
        raise UsageError(errors[0] if errors else "a process of --jobs failed: the same command continues from there")
