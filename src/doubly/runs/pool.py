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
from doubly.rundir import RunDir, is_run, read_metrics
from doubly.runs.autoattack import Watch
from doubly.runs.config import Run
from doubly.runs.load import other_configuration
from doubly.runs.loop import train_run
from doubly.runs.measure_run import evaluate_run, measured
from doubly.runs.measuring import Measuring
from doubly.runs.progress import bar_columns
from doubly.runs.saved_config import from_json, to_json
from doubly.runs.signals import stop_on_signals

# `doubly evaluate` asks the trust panel of the runs that matter.
WITHOUT_TRUST = Measuring(trust=False)


@dataclass(frozen=True)
class Job:
    run: Run
    output: Path
    measure: Measuring | None = WITHOUT_TRUST  # on the test images, once trained; None leaves them alone
    attacks: tuple[str, ...] = ("pgd", "margin")

    @property
    def done(self) -> bool:
        """A directory that holds another run is not: its numbers are not those of this one."""
        if not self.holds:
            return False
        if self.measure is None:
            return self.epochs_done == self.run.epochs
        return measured(self.output, self.run, self.attacks, self.measure)

    @property
    def holds(self) -> bool:
        """Whether the directory has been begun, with this run."""
        try:
            return is_run(self.output) and self.conflict is None
        except UsageError:  # nothing that can be read: the worker will say so
            return False

    @property
    def conflict(self) -> str | None:
        """How the run that the directory holds differs from this one, if it holds another."""
        return other_configuration(self.output, self.run) if is_run(self.output) else None

    @property
    def epochs_done(self) -> int:
        return len(read_metrics(RunDir(self.output).metrics))

    @property
    def state(self) -> str:
        if self.done:
            return "done"
        if not self.holds:
            return "to do"
        epochs = self.epochs_done
        return f"cut at epoch {epochs} of {self.run.epochs}" if epochs < self.run.epochs else "trained, to measure"


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
        futures = {pool.submit(_work, to_json(job.run), job.output, job.measure, job.attacks): job for job in waiting}
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


def _work(config: Any, output: Path, measure: Measuring | None, attacks: tuple[str, ...]) -> str | None:
    """In the worker: one job; a sentence if it failed, whatever it failed of."""
    if _stopping.is_set():
        return "not begun"
    try:
        with stop_on_signals():  # the parent decides, so that a Ctrl-C in the terminal is heard once
            run: Run = from_json(config)
            train_run(run, output, resume=True, stop=_stopping.is_set)
            if measure is not None:
                evaluate_run(output, attacks=attacks, root=run.data.root, how=measure, watch=_Stopping())
    except Exception as problem:  # one run that fails does not stop the others
        return f"{type(problem).__name__}: {problem}"
    return None


class _Stopping(Watch):
    """Ends an evaluation when the pool is to end: AutoAttack takes hours, and goes on from what it has written."""

    def images(self, done: int, of: int) -> None:
        if _stopping.is_set():
            raise Interrupted("stopped while measuring")

    def left(self, seconds: float | None) -> None:
        self.images(0, 0)


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
