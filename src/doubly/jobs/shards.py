"""AutoAttack's chunks shared out among processes of this machine, and what becomes of them when they are stopped."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from doubly.cli.options import taken
from doubly.cli.tables import say
from doubly.errors import Interrupted, UsageError


@contextmanager
def stopping() -> Iterator[None]:
    """Ctrl-C and SIGTERM end it with a sentence: what AutoAttack wrote is whole at any time."""
    asked = signal.SIGINT

    def terminate(number: int, frame: Any) -> None:
        nonlocal asked
        asked = signal.SIGTERM
        raise KeyboardInterrupt

    alone = threading.current_thread() is threading.main_thread()
    # Also SIGINT, which a shell makes its background jobs ignore.
    handlers = {signal.SIGTERM: terminate, signal.SIGINT: signal.default_int_handler} if alone else {}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    except KeyboardInterrupt:
        ending = Interrupted("stopped; what AutoAttack has finished is kept, and the same command goes on from there")
        ending.number = asked
        raise ending from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _later() -> Iterator[None]:
    """Signals that come inside are heard after it."""
    came: list[int] = []
    alone = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if alone else ()
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


def run_shards(arguments: Sequence[str], jobs: int, err: Console) -> None:
    """Every job does its chunks in a process of its own, with its share of the cores; the caller puts them together."""
    from doubly.jobs.pool import cores

    words = list(arguments)
    taken(words, "--jobs")
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores() // jobs))}
    command = [sys.executable, "-m", "doubly", "evaluate", *words, "--shard"]
    problems: list[str] = []

    def relay(lines: Any) -> None:
        for line in lines:
            if line.startswith("doubly: "):
                problems.append(line.removeprefix("doubly: ").strip())
            else:
                say(err, line.rstrip("\n"))

    processes, readers = [], []
    try:
        with _later():  # a process that has begun is one that will be ended
            for k in range(jobs):
                pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
                processes.append(subprocess.Popen([*command, str(k), str(jobs)], env=environment, **pipes))  # type: ignore[call-overload]
                readers.append(threading.Thread(target=relay, args=(processes[-1].stderr,), daemon=True))
                readers[-1].start()
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process, reader in zip(processes, readers, strict=True):
            process.wait()
            reader.join()
            process.stderr.close()
    if any(codes):
        raise UsageError(problems[0] if problems else "a process of --jobs failed; the same command goes on from there")
