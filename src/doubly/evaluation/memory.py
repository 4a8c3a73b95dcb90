"""Microbatches for when memory runs out: take fewer images at a time, and try again."""

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from doubly.checks import is_out_of_memory
from doubly.errors import UsageError

T = TypeVar("T")
UNLIMITED = sys.maxsize


def run_if_fits(work: Callable[[], T]) -> tuple[T] | None:
    """Return what `work` returns, in a tuple; None if it ran out of memory, which is free again then."""
    try:
        return (work(),)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only here: as long as the error is held, its traceback holds the tensors of every function on the way.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


class MicrobatchLimit:
    """The number of images taken at a time: all, until memory runs out; from then on half as many, and so on."""

    def __init__(self, warn: Callable[[str], None] = lambda message: None) -> None:
        """Start without a limit.

        Args:
            warn: Called with a sentence when memory has run out for the first time.
        """
        self.warn = warn
        self.max_images = UNLIMITED
        self.largest_tried = 0

    def map(self, count: int, work: Callable[[int, int], T]) -> list[T]:
        """Return what `work(start, end)` returns for each microbatch of `count` images."""
        results: list[T] = []
        start = 0
        while start < count:
            end = min(start + self.max_images, count)
            self.largest_tried = max(self.largest_tried, end - start)
            result = run_if_fits(lambda start=start, end=end: work(start, end))  # type: ignore[misc]
            if result is None:
                self._halve(end - start)
            else:
                results.append(result[0])
                start = end
        return results

    def retry(self, work: Callable[[], T]) -> T:
        """Return what `work`, which calls a `MicrobatchedModel`, returns; start it again if memory runs out in it."""
        while True:
            self.largest_tried = 0
            result = run_if_fits(work)
            if result is not None:
                return result[0]
            self._halve(self.largest_tried)

    def _halve(self, size: int) -> None:
        if size <= 1:
            raise UsageError(
                "out of memory with a single image: close what else uses the memory, or take another device or machine"
            )
        if self.max_images == UNLIMITED:
            self.warn(f"out of memory with {size} images at a time: continuing with fewer, which changes only the time")
        self.max_images = size // 2


class MicrobatchedModel(nn.Module):
    """A network in evaluation mode that takes its images in microbatches once memory has run out.

    A backward pass then recomputes each microbatch, since otherwise the activations of all would be kept for it.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], limit: MicrobatchLimit) -> None:
        super().__init__()
        self.network, self.limit = forward, limit

    def forward(self, x: Tensor) -> Tensor:
        if not len(x):
            return self.network(x)
        graph = torch.is_grad_enabled() and x.requires_grad

        def logits_of(start: int, end: int) -> Tensor:
            part = x if end - start == len(x) else x[start:end]
            if graph and self.limit.max_images < UNLIMITED:
                logits: Tensor = checkpoint(self.network, part, use_reentrant=False, preserve_rng_state=False)
                return logits
            return self.network(part)

        logits = self.limit.map(len(x), logits_of)
        return logits[0] if len(logits) == 1 else torch.cat(logits)
