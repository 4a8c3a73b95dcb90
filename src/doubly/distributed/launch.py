"""Join the processes that `torchrun` started, and leave them again."""

import os
import platform
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from doubly.distributed.collectives import SINGLE_PROCESS, Communicator, ProcessGroup
from doubly.errors import UsageError
from doubly.version import __version__

TIMEOUT = timedelta(minutes=30)  # for a process that is silent; with gloo, one that ends is noticed at once
CONNECT_TIMEOUT = timedelta(minutes=1)  # to a store that listens

_rendezvous_count = 0  # of this process; every process of a job counts alike, so that all use the same key


def launched() -> tuple[int, int]:
    """Return (rank, world size) as torchrun set them, whether joined yet or not; (0, 1) without torchrun.

    Raises:
        UsageError: If the environment variables are not numbers.
    """
    try:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    except ValueError:
        raise UsageError(
            f"RANK and WORLD_SIZE are numbers, got '{os.environ.get('RANK')}' and '{os.environ.get('WORLD_SIZE')}': "
            "let torchrun set them, or unset them"
        ) from None


def job_id() -> str:
    """Return torchrun's name for this job, which stays the same over restarts; empty without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def was_restarted(communicator: Communicator) -> bool:
    """Return whether torchrun restarted any process of this job; their own counters may differ."""
    restarted = "yes" if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else ""
    return any(communicator.all_gather_text(restarted))


def local_rank() -> int:
    """Return the number of this process among those of this machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


@contextmanager
def join_processes(timeout: timedelta = TIMEOUT) -> Iterator[Communicator]:
    """Connect the processes of torchrun inside; without torchrun there is a single one.

    A process group that the caller has initialized is used as it is, and not closed.

    Args:
        timeout: How long a process waits for the others in one exchange.

    Yields:
        The communicator of this process.

    Raises:
        UsageError: If the others cannot be reached or have other versions of doubly, torch or Python.
    """
    rank, world_size = launched()
    if dist.is_available() and dist.is_initialized():
        yield ProcessGroup() if dist.get_world_size() > 1 else SINGLE_PROCESS
        return
    if world_size == 1:
        yield SINGLE_PROCESS
        return
    _initialize(rank, world_size, timeout)
    try:
        communicator = ProcessGroup()
        versions = f"doubly {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        communicator.require_equal("versions", versions, "install the same ones on every machine")
        yield communicator
    finally:
        dist.destroy_process_group()


def _initialize(rank: int, world_size: int, timeout: timedelta) -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        raise UsageError("this build of torch has no gloo backend, which several processes need: install another build")
    cuda = torch.cuda.is_available()
    if cuda and not dist.is_nccl_available():
        raise UsageError("this build of torch has no NCCL, which several GPUs need: install another build")
    if cuda:
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
    try:
        # Decisions are exchanged on the CPU, gradients where they are.
        _rendezvous(rank, world_size, "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout)
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"process {rank} of {world_size} did not reach the others ({str(error).splitlines()[0]:.160}): start them "
            "with torchrun, with the same --rdzv-endpoint on every machine"
        ) from None


def _rendezvous(rank: int, world_size: int, backend: str, timeout: timedelta) -> None:
    """Initialize the process group in a new store.

    torchrun's store outlives restarts and may hold the addresses of processes that are gone. So the first process
    opens a new store and publishes its port in torchrun's. A port found there may be that of an earlier, closed store:
    then the process looks again. It does not try to connect a TCPStore there, because torch 2.13 may abort the process
    when that fails.
    """
    global _rendezvous_count
    _rendezvous_count += 1
    published, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    key, host = f"doubly, meeting {_rendezvous_count}", os.environ["MASTER_ADDR"]
    if rank == 0:
        store = dist.TCPStore(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        published.set(key, str(store.port))
        return dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            port = int(published.get(key))
            if not _is_listening(host, port):
                raise RuntimeError(f"no store listens at {host}:{port}")
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, world_size, is_master=False, timeout=CONNECT_TIMEOUT, wait_for_workers=False
            )
            store.set_timeout(timeout)
            return dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _is_listening(host: str, port: int) -> bool:
    """Return whether somebody accepts connections at this address."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT.total_seconds()):
            return True
    except OSError:
        return False
