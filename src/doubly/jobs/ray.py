"""Many jobs on a Ray cluster: one task each, all writing ordinary run directories in a folder that the nodes share.

Ray restarts a task whose process or node is lost, and the job continues from its checkpoint. Ray is an optional
dependency, imported only when it is used.
"""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from doubly.errors import UsageError
from doubly.jobs.job import MAX_ATTEMPTS, Job, describe_crash, run_job, unfinished_jobs
from doubly.jobs.pool import core_count, thread_variables
from doubly.jobs.progress import wait_for_jobs
from doubly.jobs.signals import interruption, stop_on_signals

DEFAULT_THREADS = 2  # of a job, if the number of jobs at a time is not given
SAVE_SECONDS = 60.0  # that jobs have to save after a request to stop
PASSED_VARIABLES = ("DOUBLY_CACHE",)  # where the datasets are


def run_on_ray(
    jobs: Sequence[Job], address: str, console: Console, *, processes: int | None = None, gpu: bool = False
) -> dict[Path, str]:
    """Train and evaluate on a Ray cluster what is not done yet.

    Args:
        jobs: The jobs.
        address: host:port of the cluster; `local` starts one here, `auto` takes the one that runs here.
        console: Where progress is printed.
        processes: How many jobs run at a time; they share the cores. None gives each two.
        gpu: Whether each job gets a GPU.

    Returns:
        For each job that failed its directory and the reason.

    Raises:
        UsageError: If Ray is not installed, there is no such cluster, or it has no node for a job.
        Interrupted: If a signal came; the jobs that were running are saved.
    """
    unfinished = unfinished_jobs([replace(job, output=job.output.absolute()) for job in jobs], console)
    if not unfinished:
        return {}
    with _connected(address) as ray:
        threads = _threads_per_job(ray, processes, gpu)
        console.print(f"on Ray at {address}: {threads} threads{' and a GPU' * gpu} for each run", highlight=False)
        task = ray.remote(_run_in_task).options(
            num_cpus=threads,
            num_gpus=int(gpu),
            max_retries=MAX_ATTEMPTS - 1,
            runtime_env={"env_vars": _environment(threads)},
        )
        with stop_on_signals() as request:  # after Ray has set its own handlers
            references = [task.remote(threads, job) for job in unfinished]
            futures = dict(zip((reference.future() for reference in references), unfinished, strict=True))
            wait_for_jobs(futures, console, request)
            if request():
                for reference in references:
                    ray.cancel(reference)
                ray.wait(references, num_returns=len(references), timeout=SAVE_SECONDS)
                raise interruption(request)
        return {job.output: error for future, job in futures.items() if (error := _error(future))}


def _run_in_task(threads: int, job: Job) -> str | None:
    """Do one job, on a node of the cluster. Ray cancels a task by SIGINT, which asks the job to save and stop."""
    torch.set_num_threads(threads)
    with stop_on_signals() as request:
        return run_job(job, request)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports about the user
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the coming default; else Ray warns
        ray: Any = import_module("ray")
    except ImportError as error:
        raise UsageError(f'Ray cannot be used ({error}): pip install "doubly[ray]"') from None
    options: dict[str, Any] = {"num_cpus": core_count(), "include_dashboard": False} if address == "local" else {}
    try:
        _check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"there is no Ray cluster at '{address}' ({reason:.160}): start one with `ray start --head`, or take "
            "--ray local"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Try to connect: Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _threads_per_job(ray: Any, processes: int | None, gpu: bool) -> int:
    """Return each job's share of the cores, which is at most what the largest node has."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if gpu:
        nodes = [node for node in nodes if node.get("GPU", 0) >= 1]
    cores = [int(node.get("CPU", 0)) for node in nodes]
    if max(cores, default=0) < 1:
        missing = "a GPU for each run" if gpu else "a core"
        raise UsageError(f"no node of this Ray cluster has {missing}: add such a node, or choose another --scale")
    share = DEFAULT_THREADS if processes is None else max(1, sum(cores) // processes)
    return min(share, max(cores))


def _environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a task."""
    passed = {name: value for name in PASSED_VARIABLES if (value := os.environ.get(name))}
    return {**thread_variables(threads), **passed}


def _error(future: Any) -> str | None:
    """Return why the job failed or how Ray lost it; None if it is done."""
    if lost := future.exception():
        return describe_crash(f"{type(lost).__name__}: {str(lost).strip().splitlines()[0]:.160}")
    return future.result()  # type: ignore[no-any-return]
