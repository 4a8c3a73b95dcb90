"""Many runs on one machine: a few processes, each with its share of the cores, all writing ordinary run directories.

What is done is skipped, what was cut is resumed, what fails is reported and does not stop the others. A process that
dies takes nobody with it: another goes on with its run.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from doubly.checkpoints.load import other_configuration
from doubly.config.run import Run
from doubly.config.serialize import from_json, to_json
from doubly.errors import Interrupted, UsageError
from doubly.evaluation.autoattack.runner import Callback
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.run_directory import evaluate_run, measured
from doubly.jobs.signals import StopRequest, stop_on_signals
from doubly.rundir import RunDir, is_run, read_metrics
from doubly.training.loop import train_run
from doubly.training.progress import bar_columns

# `doubly evaluate` asks the trust panel of the runs that matter.
WITHOUT_TRUST = EvalConfig(trust=False)
LIVES = 3  # how often a run whose process dies is begun or gone on with


@dataclass(frozen=True)
class Job:
    run: Run
    output: Path
    measure: EvalConfig | None = WITHOUT_TRUST  # on the test images, once trained; None leaves them alone
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
    def plain(self) -> tuple[Any, Path, EvalConfig | None, tuple[str, ...]]:
        """What another process needs to know of it."""
        return to_json(self.run), self.output, self.measure, self.attacks

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
    waiting = left_of(jobs, console)
    if not waiting:
        return {}
    processes = min(processes, len(waiting))
    threads = max(1, cores() // processes)
    stopping = get_context("spawn").RawValue("b", 0)  # without a lock, with which a process could die
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def work(job: Job) -> str | None:
        worker = idle.get()
        try:
            return worker.work(job)
        finally:
            idle.put(worker)

    with stop_on_signals() as request, pinned(threads):
        workers = [_Worker(threads, stopping) for _ in range(processes)]
        for worker in workers:
            idle.put(worker)
        with ThreadPoolExecutor(processes) as pool:
            futures = {pool.submit(work, job): job for job in waiting}
            try:
                follow(futures, console, request)
            finally:
                if request():
                    stopping.value = 1  # the workers save where they are, and begin nothing more
                    pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.end()
        if request():
            raise stopped(request)
        return {job.output: problem for future, job in futures.items() if (problem := future.result())}


def left_of(jobs: Sequence[Job], console: Console) -> list[Job]:
    """Those that are not done; says how many are."""
    waiting = [job for job in jobs if not job.done]
    if len(waiting) < len(jobs):
        console.print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already", highlight=False)
    return waiting


def stopped(request: StopRequest) -> Interrupted:
    ending = Interrupted("stopped; the same command goes on where this one left off")
    ending.number = request.number or ending.number
    return ending


def threads_of(threads: int) -> dict[str, str]:
    """The environment in which OpenMP and the libraries for matrices, which read it when they are loaded, agree."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """What is started meanwhile has so many threads from its first import on."""
    before = {name: os.environ.get(name) for name in threads_of(threads)}
    os.environ |= threads_of(threads)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class _Worker:
    """A process that does one job after another; where it dies, a new one goes on with the job."""

    def __init__(self, threads: int, stopping: Any) -> None:
        self.pinned = threads, stopping
        self.begin()

    def begin(self) -> None:
        # A fork would copy torch's thread pool in an unknown state. A pool of one, since a pool breaks as a whole.
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), _pin, self.pinned)

    def end(self) -> None:
        self.pool.shutdown()

    def work(self, job: Job) -> str | None:
        for _ in range(LIVES):
            try:
                return self.pool.submit(_work, *job.plain).result()
            except BrokenProcessPool:
                self.end()
                self.begin()
        return died(LIVES, "its process was killed, perhaps for want of memory")


def died(times: int, how: str) -> str:
    return f"died {times} times ({how}): run fewer jobs at a time, and the same command goes on where it stopped"


_stopping: Any = None  # in a worker: 1 when the pool is to end


def _pin(threads: int, stopping: Any) -> None:
    global _stopping
    torch.set_num_threads(threads)
    _stopping = stopping


def _stop() -> bool:
    return bool(_stopping.value)


def _work(config: Any, output: Path, measure: EvalConfig | None, attacks: tuple[str, ...]) -> str | None:
    """In the worker: one job."""
    if _stop():
        return "not begun"
    with stop_on_signals():  # the parent decides, so that a Ctrl-C in the terminal is heard once
        return attempt(config, output, measure, attacks, _stop)


def attempt(
    config: Any, output: Path, measure: EvalConfig | None, attacks: tuple[str, ...], stop: Callable[[], bool]
) -> str | None:
    """One job, gone on with where it was cut; a sentence if it failed, whatever it failed of."""
    try:
        run: Run = from_json(config)
        if not Job(run, output, measure, attacks).done:  # by one that died with the answer
            train_run(run, output, resume=True, stop=stop)
            if measure is not None:
                evaluate_run(output, attacks=attacks, root=run.data.root, how=measure, watch=_Stopping(stop))
    except Exception as problem:  # one run that fails does not stop the others
        return f"{type(problem).__name__}: {problem}"
    return None


class _Stopping(Callback):
    """Ends an evaluation when all is to end: AutoAttack takes hours, and goes on from what it has written."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self.stop = stop

    def images(self, done: int, of: int) -> None:
        if self.stop():
            raise Interrupted("stopped while measuring")

    def left(self, seconds: float | None) -> None:
        self.images(0, 0)


def follow(futures: Mapping["Future[Any]", Job], console: Console, stop: Callable[[], bool]) -> None:
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
            wait(futures, timeout=1.0)
