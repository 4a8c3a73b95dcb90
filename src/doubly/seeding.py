"""Random numbers that follow from (seed, epoch, step, purpose), whatever the number of processes and restarts."""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from doubly.errors import UsageError


def derived_seed(seed: int, epoch: int, step: int, purpose: str) -> int:
    """Return 63 bits of a hash, so that neighboring seeds and steps give unrelated streams."""
    key = f"{seed}/{epoch}/{step}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def generator(seed: int, epoch: int, step: int, purpose: str) -> torch.Generator:
    """Return a CPU generator: its draws are the same on every device, and are moved there afterwards."""
    return torch.Generator().manual_seed(derived_seed(seed, epoch, step, purpose))


class Rows(NamedTuple):
    """Positions of some rows in the global batch: `start`, `start + 1`, … of `total`."""

    start: int
    total: int


class BatchGenerator:
    """Random numbers for the rows of a batch.

    They are drawn for the global batch and cut to the rows of this process, so that a sample gets the same numbers at
    any number of processes and microbatches.
    """

    def __init__(self, generator: torch.Generator, rows: Rows | None = None) -> None:
        """Wrap a generator.

        Args:
            generator: A CPU generator, in the same state on every process.
            rows: Rows of the global batch that are drawn for; None if the batch is the global batch.
        """
        self.generator, self.rows = generator, rows

    @staticmethod
    def of(generator: "AnyGenerator") -> "BatchGenerator":
        """Return the generator, or one that wraps torch's or has this seed; None is seed 0.

        Raises:
            UsageError: If it is something else.
        """
        if isinstance(generator, BatchGenerator):
            return generator
        if generator is None or (isinstance(generator, int) and not isinstance(generator, bool)):
            if generator is not None and not -(2**63) <= generator < 2**64:
                raise UsageError(f"a seed is a whole number of at most 64 bits, got {generator}: take a smaller one")
            generator = torch.Generator().manual_seed(generator or 0)
        if not isinstance(generator, torch.Generator):
            raise UsageError(
                f"random numbers come from a seed or a torch.Generator, got {type(generator).__name__}: pass a whole "
                "number, or torch.Generator().manual_seed(0)"
            )
        return BatchGenerator(generator)

    def uniform(self, like: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1) of the shape, device and dtype of `like`."""
        start, total = self.rows or Rows(0, len(like))
        drawn = torch.rand(total, *like.shape[1:], generator=self.generator)
        return drawn[start : start + len(like)].to(like.device, like.dtype)


AnyGenerator = BatchGenerator | torch.Generator | int | None
"""What `BatchGenerator.of` takes."""


@contextmanager
def global_generators(seed: int) -> Iterator[None]:
    """Seed torch's global generators (dropout, default initializers) inside, and restore the caller's afterwards."""
    with forked():
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # torch.manual_seed takes half a millisecond for devices that do not exist
            torch.default_generator.manual_seed(seed)
        yield


def forked() -> AbstractContextManager[None]:
    """Restore torch's global generators, of the CPU and of the GPU in use, afterwards."""
    in_use = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.random.fork_rng(in_use)
