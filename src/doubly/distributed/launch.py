"""Joining the other processes that `torchrun` started, and leaving them; nothing on one process."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

import doubly
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError

PATIENCE = timedelta(minutes=30)  # with a process that is silent; with gloo, one that ends is noticed at once
SOON = timedelta(seconds=5)

_meetings = 0  # of this process, in which all others took part


def started() -> tuple[int, int]:
    """(rank, number) of the processes that torchrun started, joined or not; (0, 1) without it."""
    try:
        return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    except ValueError:
        raise UsageError(
            f"RANK and WORLD_SIZE are numbers, got '{os.environ.get('RANK')}' and '{os.environ.get('WORLD_SIZE')}': "
            "let torchrun set them, or unset them"
        ) from None


def job() -> str:
    """What torchrun calls these processes, which it keeps when it starts them anew; empty without it."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def restarted() -> bool:
    """Whether torchrun has started processes of this run anew, after one was lost; not all of them count that."""
    return any(parallel.everybodys("yes" if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else ""))


def local_rank() -> int:
    """Among the processes of this machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


@contextmanager
def joined(patience: timedelta = PATIENCE) -> Iterator[None]:
    """Inside, the processes of torchrun know each other; where somebody has joined them already, that one leaves."""
    rank, size = started()
    if size == 1 or (dist.is_available() and dist.is_initialized()):
        yield
        return
    _join(rank, size, patience)
    try:
        versions = f"doubly {doubly.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        parallel.agree("versions", versions, "install the same ones on every machine")
        yield
    finally:
        dist.destroy_process_group()


def _join(rank: int, size: int, patience: timedelta) -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        raise UsageError("this build of torch has no gloo backend, which several processes need: install another build")
    cuda = torch.cuda.is_available()
    if cuda and not dist.is_nccl_available():
        raise UsageError("this build of torch has no NCCL, which several GPUs need: install another build")
    if cuda:
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
    try:
        # Decisions and draws are exchanged on the CPU, gradients where they are.
        _meet(rank, size, "cpu:gloo,cuda:nccl" if cuda else "gloo", patience)
    except (ValueError, RuntimeError) as problem:
        raise UsageError(
            f"process {rank} of {size} did not reach the others ({str(problem).splitlines()[0]:.160}): start them with "
            "torchrun, with the same --rdzv-endpoint on every machine"
        ) from None


def _meet(rank: int, size: int, backend: str, patience: timedelta) -> None:
    """In a store of this meeting's own: torchrun's outlives restarts, and holds the addresses of processes long gone.

    The first process opens it and says in torchrun's where it is. What another finds there may be of an earlier one,
    that is no more or about to end; then it looks again.
    """
    global _meetings
    _meetings += 1
    known, _, _ = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
    key, host = f"doubly, meeting {_meetings}", os.environ["MASTER_ADDR"]
    if rank == 0:
        store = dist.TCPStore(host, 0, size, is_master=True, timeout=patience, wait_for_workers=False)  # type: ignore[attr-defined]
        known.set(key, str(store.port))
        return dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            port = int(known.get(key))
            store = dist.TCPStore(host, port, size, is_master=False, timeout=SOON, wait_for_workers=False)  # type: ignore[attr-defined]
            store.set_timeout(patience)
            return dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
