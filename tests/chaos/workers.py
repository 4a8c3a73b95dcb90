"""Tasks in forked processes, a few at a time, from one that has imported torch and has a single thread."""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.outcomes import FINE, Outcome


class Task(NamedTuple):
    """A part of a campaign.

    Attributes:
        campaign: The row of the table that it counts for.
        function: Called with (base, seed, count) in an empty folder; yields outcomes.
        seed: Decides all that it draws.
        count: Number of attempts.
        seconds: After which it is ended, and counts as lost.
    """

    campaign: str
    function: Callable[[Path, int, int], Iterator[Outcome]]
    seed: int
    count: int
    seconds: float = 900.0


def run_tasks(
    tasks: Sequence[Task], workers: int, folder: Path, base: Path, quiet: bool = False
) -> dict[str, list[Outcome]]:
    """Run all tasks and return the outcomes of each campaign.

    Args:
        tasks: What to do.
        workers: How many processes at a time.
        folder: For the tasks' files.
        base: The folder with prepared runs, which tasks copy from.
        quiet: Whether to print no progress.
    """
    waiting, running = list(enumerate(tasks))[::-1], {}
    outcomes: dict[str, list[Outcome]] = {task.campaign: [] for task in tasks}
    while waiting or running:
        while waiting and len(running) < workers:
            number, task = waiting.pop()
            place = folder / f"task{number}"
            place.mkdir(parents=True)
            running[_start(task, place, base)] = task, place, time.monotonic()
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in running:
            task, place, begun = running.pop(ended)
            results = _read(task, place, status)
            outcomes[task.campaign] += results
            for outcome in results:
                if outcome.kind not in FINE:
                    print(f"{outcome.kind.upper()} {outcome.note}", flush=True)
            _kill_group(ended)  # what it may have left running
            shutil.rmtree(place, ignore_errors=True)
            if not quiet:
                seconds = time.monotonic() - begun
                print(f"{task.campaign}: {task.count} in {seconds:.0f} s; {len(waiting)} tasks left", flush=True)
            continue
        for pid, (task, _, begun) in running.items():
            if time.monotonic() - begun > task.seconds:
                _kill_group(pid)
        time.sleep(0.02)
    return outcomes


def _start(task: Task, place: Path, base: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(place / "output", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        (place / "work").mkdir()
        os.chdir(place / "work")
        with (place / "outcomes").open("w", encoding="utf-8", errors="backslashreplace") as stream:
            for outcome in task.function(base, task.seed, task.count):
                print(json.dumps(outcome), file=stream, flush=True)
        code = 0
    except BaseException:
        (place / "error").write_text(traceback.format_exc(), errors="backslashreplace")
    finally:
        os._exit(code)


def _read(task: Task, place: Path, status: int) -> list[Outcome]:
    path = place / "outcomes"
    results = [Outcome(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    if os.waitstatus_to_exitcode(status):
        error = place / "error"
        reason = error.read_text()[-1500:] if error.exists() else f"exit status {os.waitstatus_to_exitcode(status)}"
        results.append(Outcome("lost", f"{task.campaign}, seed {task.seed}, after {len(results)}: {reason}"))
    return results


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def fork_call(function: Callable[[], Any], out: Path, err: Path) -> int:
    """Start a function in a forked process of its own group; it ends with the number that the function returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code = int(function())
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
    finally:
        os._exit(code)
