"""Many runs on one machine: a few processes, each with its share of the cores, all writing ordinary run directories.

What is done is skipped, what was cut is resumed, what fails is reported and does not stop the others.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from doubly.errors import NonFiniteError, UsageError
from doubly.rundir import RunDir, read_metrics
from doubly.runs.config import Run
from doubly.runs.loop import Interrupted, train_run
from doubly.runs.measure import evaluate_run
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
        if self.evaluate:
            return RunDir(self.output).evaluation.exists()
        return self.epochs_done == self.run.epochs

    @property
    def epochs_done(self) -> int:
        return len(read_metrics(RunDir(self.output).metrics))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(jobs: Sequence[Job], processes: int, console: Console) -> dict[Path, str]:
    """Train and evaluate what is not done yet; returns a sentence for each run that failed."""
    waiting = [job for job in jobs if not job.done]
    if len(waiting) < len(jobs):
        console.print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already", highlight=False)
    if not waiting:
        return {}
    processes = min(processes, len(waiting))
    context = get_context("spawn")  # a fork would copy torch's thread pool in an unknown state
    with ProcessPoolExecutor(processes, context, _pin, (max(1, cores() // processes),)) as pool:
        futures = {pool.submit(_work, to_json(job.run), job.output, job.evaluate): job for job in waiting}
        try:
            _follow(futures, console)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            console.print("stopped; the same command goes on where this one left off", highlight=False)
            raise
        return {job.output: problem for future, job in futures.items() if (problem := future.result())}


def _pin(threads: int) -> None:
    torch.set_num_threads(threads)


def _work(config: Any, output: Path, evaluate: bool) -> str | None:
    """In the worker: one job; a sentence if it failed."""
    try:
        with stop_on_signals() as request:
            train_run(from_json(config), output, resume=True, stop=request)
        if evaluate:
            evaluate_run(output)
    except (UsageError, NonFiniteError, Interrupted) as problem:
        return str(problem)
    return None


def _follow(futures: dict["Future[str | None]", Job], console: Console) -> None:
    """A bar over all epochs on a terminal, a line per finished run elsewhere."""
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
            if len(finished) == len(futures):
                return
            time.sleep(0.5)
