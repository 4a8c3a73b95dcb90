"""Many runs on a Ray cluster: a task per run, all writing ordinary run directories in a folder that the nodes share.

Ray begins a task again whose process or node is lost, and the run goes on from its checkpoint. The package is an extra,
and is imported when it is asked for.
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
from doubly.evaluation.config import EvalConfig
from doubly.jobs.pool import LIVES, Job, attempt, cores, died, follow, left_of, stopped, threads_of
from doubly.jobs.signals import stop_on_signals

THREADS = 2  # of a run, where nobody says how many are to run at a time
PATIENCE = 60.0  # seconds in which a run that is asked to stop has saved


def run_on_ray(
    jobs: Sequence[Job], address: str, console: Console, *, processes: int | None = None, gpu: bool = False
) -> dict[Path, str]:
    """As `run_jobs`, on the cluster at that address: `local` starts one here, `auto` finds the one that runs here.

    `processes`: runs at a time, which share the cores; `gpu`: each run has one.
    """
    waiting = left_of([replace(job, output=job.output.absolute()) for job in jobs], console)
    if not waiting:
        return {}
    with _connected(address) as ray:
        threads = _threads(ray, processes, gpu)
        console.print(f"on Ray at {address}: {threads} threads{' and a GPU' * gpu} for each run", highlight=False)
        task = ray.remote(_work).options(
            num_cpus=threads, num_gpus=int(gpu), max_retries=LIVES - 1, runtime_env={"env_vars": _environment(threads)}
        )
        with stop_on_signals() as request:  # after Ray's own handlers
            references = [task.remote(threads, *job.plain) for job in waiting]
            futures = dict(zip((reference.future() for reference in references), waiting, strict=True))
            follow(futures, console, request)
            if request():
                for reference in references:
                    ray.cancel(reference)
                ray.wait(references, num_returns=len(references), timeout=PATIENCE)
                raise stopped(request)
        return {job.output: problem for future, job in futures.items() if (problem := _problem(future))}


def _work(threads: int, config: Any, output: Path, measure: EvalConfig | None, attacks: tuple[str, ...]) -> str | None:
    """In the cluster: one job. Ray cancels by what Ctrl-C does, which asks the run to save and end."""
    torch.set_num_threads(threads)
    with stop_on_signals() as request:
        return attempt(config, output, measure, attacks, request)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # we tell nobody what is run
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the coming default; else Ray warns
        ray: Any = import_module("ray")
    except ImportError as problem:
        raise UsageError(f'Ray cannot be used ({problem}): pip install "doubly[ray]"') from None
    here: dict[str, Any] = {"num_cpus": cores(), "include_dashboard": False} if address == "local" else {}
    try:
        _answers(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **here)
    except (ConnectionError, RuntimeError, ValueError, OSError) as problem:
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        raise UsageError(
            f"there is no Ray cluster at '{address}' ({reason:.160}): start one with `ray start --head`, or take "
            "--ray local"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _answers(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _threads(ray: Any, processes: int | None, gpu: bool) -> int:
    """Of each run: its share of the cores, and no more than the largest node has."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if gpu:
        nodes = [node for node in nodes if node.get("GPU", 0) >= 1]
    sizes = [int(node.get("CPU", 0)) for node in nodes]
    if max(sizes, default=0) < 1:
        lacking = "a GPU for each run" if gpu else "a core"
        raise UsageError(f"no node of this Ray cluster has {lacking}: add such a node, or choose another --scale")
    share = THREADS if processes is None else max(1, sum(sizes) // processes)
    return min(share, max(sizes))


def _environment(threads: int) -> dict[str, str]:
    """Of a run's process; the folder of the datasets too, if it is named here."""
    return {**threads_of(threads), **{k: v for k in ("DOUBLY_CACHE",) if (v := os.environ.get(k))}}


def _problem(future: Any) -> str | None:
    """What the run said, or how Ray lost it."""
    if lost := future.exception():
        return died(LIVES, f"{type(lost).__name__}: {str(lost).strip().splitlines()[0]:.160}")
    return future.result()  # type: ignore[no-any-return]
