"""Seconds and peak memory of a piece of work, on the CPU or on CUDA."""

import time
from collections.abc import Callable

import torch

from doubly.training.memory import peak_memory, reset_peak_memory


def wait_for(device: torch.device) -> None:
    """Wait for the device: CUDA kernels run on after their call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the work takes."""
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


def peak_above(work: Callable[[], object], device: torch.device) -> float:
    """Return the MiB that the work adds to the peak; call it in a new process, since heaps do not shrink."""
    reset_peak_memory(device)
    before = peak_memory(device) or 0
    work()
    wait_for(device)
    return ((peak_memory(device) or 0) - before) / 2**20
