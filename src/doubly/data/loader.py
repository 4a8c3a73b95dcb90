"""One epoch as batches. Images stay on their device; order and augmentation follow from (seed, epoch, step) alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from doubly.data.augment import Augmentation
from doubly.data.images import Images, in_unit_range
from doubly.distributed import collectives as parallel
from doubly.errors import UsageError
from doubly.seeding import generator
from doubly.types import Batch


def steps_per_epoch(n: int, size: int) -> int:
    """Batches of `size` over all processes; the last may be smaller, and what they cannot share equally is left out."""
    _, processes = parallel.world()
    if size < 1 or size % processes:
        raise UsageError(
            f"a global batch of {size} cannot be shared by {processes} processes: give a multiple of {processes}"
        )
    shared = n - n % processes
    # One left-over sample is no batch: batch norm cannot normalize it. It is another one in every epoch.
    return -(-shared // size) - (shared > size and shared % size == 1)


def batches(
    images: Images,
    size: int,
    seed: int,
    epoch: int,
    *,
    augment: Augmentation | None = None,
    probabilities: Tensor | None = None,
    start: int = 0,
    channels_last: bool = False,
) -> Iterator[Batch]:
    """This rank's part of each global batch, from step `start` on.

    One pass over the images in random order; or, with a probability per class, as many draws with replacement.
    """
    steps = steps_per_epoch(len(images), size)
    random = generator(seed, epoch, 0, "order")
    if probabilities is None:
        order = torch.randperm(len(images), generator=random)
    else:
        order = _drawn_by_class(images, probabilities, random)
    order = order.to(images.x.device)
    on_bytes = getattr(augment, "moves_pixels", False)  # a quarter of the memory to move
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def batch(step: int) -> Batch:
        rows = _own_part(order[step * size : (step + 1) * size])
        x = images.taken(rows) if on_bytes else images.pixels(rows)
        if augment is not None:
            x = augment(x, generator(seed, epoch, step, "augment"))
        x = in_unit_range(x)
        return Batch(x.contiguous(memory_format=layout), images.y[rows], images.ids[rows])

    return map(batch, range(start, steps))


def _own_part(rows: Tensor) -> Tensor:
    """A contiguous share of the global batch, equally large on every rank."""
    rank, processes = parallel.world()
    share = len(rows) // processes
    return rows[rank * share : (rank + 1) * share]


def _drawn_by_class(images: Images, probabilities: Tensor, random: torch.Generator) -> Tensor:
    """As many rows as there are images: the class by its probability, then any image of it alike."""
    chances = probabilities.detach().cpu().double()
    counts = images.counts().cpu()
    if chances.shape != counts.shape:
        raise UsageError(
            f"sampling needs {len(counts)} class probabilities, got a tensor of shape {tuple(chances.shape)}"
        )
    if ((chances > 0) & (counts == 0)).any():
        raise UsageError("a class without images has a sampling probability above 0: set it to 0 or drop the class")
    drawn = torch.multinomial(chances, len(images), replacement=True, generator=random)
    inside = (torch.rand(len(images), generator=random, dtype=torch.float64) * counts[drawn]).long()
    by_class = images.y.cpu().argsort(stable=True)
    return by_class[(counts.cumsum(0) - counts)[drawn] + inside]
