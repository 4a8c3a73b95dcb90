"""How much memory was taken, of the device where it is CUDA, of the process where it is not; and if it runs out."""

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from doubly.checks import is_out_of_memory
from doubly.errors import UsageError

T = TypeVar("T")
_ALL = sys.maxsize
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak(device: torch.device) -> None:
    """Begin anew, so that a second run in the same process does not inherit the peak of the first."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # only Linux can, and not everywhere
        _CLEAR.write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """In bytes; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def fitted(work: Callable[[], T]) -> tuple[T] | None:
    """What the work returns; None if it ran out of memory, which is free again then."""
    try:
        return (work(),)
    except (RuntimeError, MemoryError) as problem:
        if not is_out_of_memory(problem):
            raise
    # Only here: as long as the problem is held, its traceback holds the tensors of every function on the way.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


class Pieces:
    """How many images are taken at a time: all, until memory runs out; from then on half as many, and so on."""

    def __init__(self, say: Callable[[str], None] = lambda sentence: None) -> None:
        self.say = say
        self.most = _ALL
        self.tried = 0  # the largest piece so far

    def of(self, count: int, work: Callable[[int, int], T]) -> list[T]:
        """What work(start, end) returns for each piece of `count` images."""
        found: list[T] = []
        start = 0
        while start < count:
            end = min(start + self.most, count)
            self.tried = max(self.tried, end - start)
            done = fitted(lambda start=start, end=end: work(start, end))  # type: ignore[misc]
            if done is None:
                self._halve(end - start)
            else:
                found.append(done[0])
                start = end
        return found

    def again(self, work: Callable[[], T]) -> T:
        """Work that asks `InPieces`: where it runs out of memory elsewhere, as in a backward pass, it is begun anew."""
        while True:
            self.tried = 0
            done = fitted(work)
            if done is not None:
                return done[0]
            self._halve(self.tried)

    def _halve(self, size: int) -> None:
        if size <= 1:
            raise UsageError(
                "out of memory with a single image: close what else uses the memory, or take another device or machine"
            )
        if self.most == _ALL:
            self.say(f"out of memory with {size} images at a time: going on with fewer, which changes only the time")
        self.most = size // 2


class InPieces(nn.Module):
    """A network in evaluation mode, asked piece by piece once memory has run out.

    A backward pass then computes each piece anew, since otherwise the activations of all pieces would be kept for it.
    """

    def __init__(self, network: Callable[[Tensor], Tensor], pieces: Pieces) -> None:
        super().__init__()
        self.network, self.pieces = network, pieces

    def forward(self, x: Tensor) -> Tensor:
        if not len(x):
            return self.network(x)
        graph = torch.is_grad_enabled() and x.requires_grad

        def asked(start: int, end: int) -> Tensor:
            piece = x if end - start == len(x) else x[start:end]
            if graph and self.pieces.most < _ALL:
                again: Tensor = checkpoint(self.network, piece, use_reentrant=False, preserve_rng_state=False)
                return again
            return self.network(piece)

        logits = self.pieces.of(len(x), asked)
        return logits[0] if len(logits) == 1 else torch.cat(logits)
