"""Seconds and peak memory of a piece of work, on the CPU or on CUDA."""

import time
from collections.abc import Callable

import torch

from doubly.evaluation.memory import forget_peak, peak_memory


def finished(device: torch.device) -> None:
    """Wait for the device: kernels of CUDA run on after their call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    finished(device)
    begun = time.perf_counter()
    work()
    finished(device)
    return time.perf_counter() - begun


def peak_above(work: Callable[[], object], device: torch.device) -> float:
    """MiB that the work takes above what was held before. In a process of its own: heaps do not shrink."""
    forget_peak(device)
    before = peak_memory(device) or 0
    work()
    finished(device)
    return ((peak_memory(device) or 0) - before) / 2**20
