"""Many runs on one machine: a few processes, each with its share of the cores, all writing ordinary run directories.

What is done is skipped, what was cut is resumed, what fails is reported and does not stop the others.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from doubly.errors import Interrupted, UsageError
from doubly.rundir import RunDir, read_metrics
from doubly.runs.config import Run
from doubly.runs.load import load_run
from doubly.runs.loop import train_run
from doubly.runs.measure_run import evaluate_run
from doubly.runs.measuring import Measuring
from doubly.runs.progress import bar_columns
from doubly.runs.saved_config import from_json, to_json
from doubly.runs.signals import stop_on_signals


@dataclass(frozen=True)
class Job:
    run: Run
    output: Path
    evaluate: bool = True  # on the test images, once trained

    @property
    def done(self) -> bool:
        """A directory that holds another run is not: its numbers are not those of this one."""
        if not _holds(self.output, self.run):
            return False
        if self.evaluate:
            return RunDir(self.output).evaluation.exists()
        return self.epochs_done == self.run.epochs

    @property
    def epochs_done(self) -> int:
        return len(read_metrics(RunDir(self.output).metrics))


def _holds(path: Path, run: Run) -> bool:
    try:
        return load_run(path) == run
    except UsageError:  # nothing there, or nothing that can be read: the worker will say so
        return False


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(jobs: Sequence[Job], processes: int, console: Console) -> dict[Path, str]:
    """Train and evaluate what is not done yet; returns a sentence for each run that failed."""
    if processes < 1:
        raise UsageError(f"jobs run in at least 1 process, got {processes}")
    waiting = [job for job in jobs if not job.done]
    if len(waiting) < len(jobs):
        console.print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already", highlight=False)
    if not waiting:
        return {}
    processes = min(processes, len(waiting))
    context = get_context("spawn")  # a fork would copy torch's thread pool in an unknown state
    stopping = context.Event()
    pinned = (max(1, cores() // processes), stopping)
    with stop_on_signals() as request, ProcessPoolExecutor(processes, context, _pin, pinned) as pool:
        futures = {pool.submit(_work, to_json(job.run), job.output, job.evaluate): job for job in waiting}
        _follow(futures, console, request)
        if request():
            stopping.set()  # the workers save where they are, and begin nothing more
            pool.shutdown(cancel_futures=True)
            ending = Interrupted("stopped; the same command goes on where this one left off")
            ending.number = request.number or ending.number
            raise ending
        return {job.output: problem for future, job in futures.items() if (problem := future.result())}


_stopping: Any = None  # in a worker: set when the pool is to end


def _pin(threads: int, stopping: Any) -> None:
    global _stopping
    torch.set_num_threads(threads)
    _stopping = stopping


def _work(config: Any, output: Path, evaluate: bool) -> str | None:
    """In the worker: one job; a sentence if it failed, whatever it failed of."""
    if _stopping.is_set():
        return "not begun"
    try:
        with stop_on_signals():  # the parent decides, so that a Ctrl-C in the terminal is heard once
            train_run(from_json(config), output, resume=True, stop=_stopping.is_set)
        if evaluate:
            evaluate_run(output, how=Measuring(trust=False))  # `doubly evaluate` asks that of the runs that matter
    except Exception as problem:  # one run that fails does not stop the others
        return f"{type(problem).__name__}: {problem}"
    return None


def _follow(futures: dict["Future[str | None]", Job], console: Console, stop: Callable[[], bool]) -> None:
    """A bar over all epochs on a terminal, a line per finished run elsewhere; until all is done or asked to stop."""
    total = sum(job.run.epochs for job in futures.values())
    reported: set[Path] = set()
    with Progress(*bar_columns(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(futures)} runs, epochs", total=total)
        while True:
            finished = [job for future, job in futures.items() if future.done()]
            progress.update(task, completed=sum(job.epochs_done for job in futures.values()))
            for job in finished:
                if job.output not in reported:
                    reported.add(job.output)
                    text = f"{len(reported)} of {len(futures)}: {job.output}"
                    console.print(text, highlight=False, markup=False, soft_wrap=True)
            if len(finished) == len(futures) or stop():
                return
            time.sleep(1.0)
