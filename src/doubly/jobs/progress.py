"""Progress of many jobs on a terminal: one bar over all their epochs."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from doubly.jobs.job import Job
from doubly.text import printable_lines

REFRESH_SECONDS = 1.0


def bar_columns() -> list[ProgressColumn]:
    """Return the columns of a progress bar: what, bar, count, time so far, time left."""
    return [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]


def wait_for_jobs(futures: Mapping["Future[Any]", Job], console: Console, stop: Callable[[], bool]) -> None:
    """Wait until all jobs have ended or `stop` says so, and print a line for each that has ended.

    Args:
        futures: The running jobs.
        console: Where the lines are printed, with a bar over all epochs if it is a terminal.
        stop: Called about once a second.
    """
    total = sum(job.run.epochs for job in futures.values())
    printed: set[Path] = set()
    with Progress(*bar_columns(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(futures)} runs, epochs", total=total)
        while True:
            ended = [job for future, job in futures.items() if future.done()]
            progress.update(task, completed=sum(job.epochs_done for job in futures.values()))
            for job in ended:
                if job.output not in printed:
                    printed.add(job.output)
                    text = printable_lines(f"{len(printed)} of {len(futures)}: {job.output}")
                    console.print(text, highlight=False, markup=False, soft_wrap=True)
            if len(ended) == len(futures) or stop():
                return
            wait(futures, timeout=REFRESH_SECONDS)
