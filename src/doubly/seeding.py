"""Every random number follows from (seed, epoch, step, purpose): no resume and no number of processes changes it."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def derived_seed(seed: int, epoch: int, step: int, purpose: str) -> int:
    """63 bits of a hash: neighboring seeds and steps give unrelated streams."""
    key = f"{seed}/{epoch}/{step}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def generator(seed: int, epoch: int, step: int, purpose: str) -> torch.Generator:
    """A generator on the CPU: draws are the same on every device, and are moved after they are made."""
    return torch.Generator().manual_seed(derived_seed(seed, epoch, step, purpose))


@contextmanager
def global_generators(seed: int) -> Iterator[None]:
    """Seed torch's global generators (dropout, default initializers) inside, and put the caller's back after."""
    with forked():
        torch.manual_seed(seed)
        yield


def forked() -> Any:
    """torch's global generators, of the CPU and of the GPU in use, are put back after."""
    in_use = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.random.fork_rng(in_use)
