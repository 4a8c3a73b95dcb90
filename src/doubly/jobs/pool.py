"""Many jobs on one machine: a few processes, each with its share of the cores, all writing ordinary run directories.

Jobs that are done are skipped, and jobs that were stopped are resumed. A job that fails is reported and does not stop
the others. If a process dies, a new one continues its job.
"""

import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from rich.console import Console

from doubly.errors import UsageError
from doubly.jobs.job import MAX_ATTEMPTS, Job, describe_crash, run_job, unfinished_jobs
from doubly.jobs.progress import wait_for_jobs
from doubly.jobs.signals import interruption, stop_on_signals


def run_jobs(jobs: Sequence[Job], processes: int, console: Console) -> dict[Path, str]:
    """Train and evaluate what is not done yet.

    Args:
        jobs: The jobs.
        processes: How many jobs run at a time; they share the cores.
        console: Where progress is printed.

    Returns:
        For each job that failed its directory and the reason.

    Raises:
        UsageError: If there is no process, or a job cannot be sent to one.
        Interrupted: If a signal came; the jobs that were running are saved.
    """
    if processes < 1:
        raise UsageError(f"jobs run in at least 1 process, got {processes}")
    unfinished = unfinished_jobs(jobs, console)
    if not unfinished:
        return {}
    check_picklable(unfinished)
    processes = min(processes, len(unfinished))
    threads = max(1, core_count() // processes)
    stopping = get_context("spawn").RawValue("b", 0)  # without a lock: a process could die while it holds it
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def run_on_idle_worker(job: Job) -> str | None:
        worker = idle.get()
        try:
            return worker.run(job)
        finally:
            idle.put(worker)

    with stop_on_signals() as request, thread_limit(threads):
        workers = [_Worker(threads, stopping) for _ in range(processes)]
        for worker in workers:
            idle.put(worker)
        with ThreadPoolExecutor(processes) as pool:
            futures = {pool.submit(run_on_idle_worker, job): job for job in unfinished}
            try:
                wait_for_jobs(futures, console, request)
            finally:
                if request():
                    stopping.value = 1  # the workers save their jobs and start no others
                    pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.shut_down()
        if request():
            raise interruption(request)
        return {job.output: error for future, job in futures.items() if (error := future.result())}


def finish_jobs(jobs: Sequence[Job], processes: int, console: Console) -> None:
    """Train and evaluate what is not done yet, as `run_jobs`, for a study that needs all of it.

    Raises:
        UsageError: If a job failed; the message names all that did.
    """
    failures = run_jobs(jobs, processes, console)
    if failures:
        raise UsageError("; ".join(f"{path}: {error}" for path, error in failures.items()))


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_picklable(jobs: Sequence[Job]) -> None:
    """Refuse jobs that cannot be sent to another process.

    Raises:
        UsageError: If pickle cannot handle a job, such as one with a lambda for a callback.
    """
    for job in jobs:
        try:
            pickle.dumps(job)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"the job of {job.output} cannot be sent to another process ({error}): give callbacks as functions or "
                "classes of a module, such as TensorBoard.in_run_dir"
            ) from None


def thread_variables(threads: int) -> dict[str, str]:
    """Return the environment variables by which OpenMP, MKL and OpenBLAS take this number of threads when loaded."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))


@contextmanager
def thread_limit(threads: int) -> Iterator[None]:
    """Let processes that are started inside have this number of threads from their first import on."""
    before = {name: os.environ.get(name) for name in thread_variables(threads)}
    os.environ |= thread_variables(threads)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class _Worker:
    """A process that does one job after another; if it dies, a new process continues the job."""

    def __init__(self, threads: int, stopping: Any) -> None:
        self.settings = threads, stopping
        self.start()

    def start(self) -> None:
        # Spawned: a fork would copy torch's thread pool in an unknown state. A pool of one: a pool breaks as a whole.
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), _set_up_worker, self.settings)

    def shut_down(self) -> None:
        self.pool.shutdown()

    def run(self, job: Job) -> str | None:
        for _ in range(MAX_ATTEMPTS):
            try:
                return self.pool.submit(_run_in_worker, job).result()
            except BrokenProcessPool:
                self.shut_down()
                self.start()
        return describe_crash("its process was killed, perhaps for lack of memory")


_stopping: Any = None  # in a worker: a shared number, 1 once the pool is to stop


def _set_up_worker(threads: int, stopping: Any) -> None:
    global _stopping
    torch.set_num_threads(threads)
    _stopping = stopping
    if (parent := parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    """End this process once its parent was killed: nobody else would, and it would go on to hold its run directory."""
    wait([sentinel])
    os._exit(1)  # what it writes is complete at any time


def _is_stopping() -> bool:
    return bool(_stopping.value)


def _run_in_worker(job: Job) -> str | None:
    if _is_stopping():
        return "not started"
    with stop_on_signals():  # the parent decides, so that one Ctrl-C in the terminal counts once
        return run_job(job, _is_stopping)
