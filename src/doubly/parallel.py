"""What several processes have to agree on. Each function is the identity on one process."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def world() -> tuple[int, int]:
    """(rank, number of processes)"""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [0,1), drawn for the global batch on the CPU and sliced by rank: alike at any number of processes."""
    rank, size = world()
    rows = like.shape[0]
    drawn = torch.rand(rows * size, *like.shape[1:], generator=generator)
    return drawn[rank * rows : (rank + 1) * rows].to(like.device, like.dtype)


def gather(values: Tensor) -> Tensor:
    """The values of all ranks, rank by rank; every rank must bring equally many."""
    if world()[1] == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(world()[1])]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def of_mean_one(log_weights: Tensor) -> Tensor:
    """exp(log_weights), scaled to a mean of 1 over the samples of all ranks; also where all of them would underflow."""
    everyone = gather(log_weights)
    largest = everyone.max()
    return (log_weights - largest).exp() / (everyone - largest).exp().mean()


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """One reduction of all gradients, flattened."""
    size = world()[1]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if size == 1 or not gradients:
        return
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    parts = torch.split(flat.div_(size), [g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
