"""The batches of one epoch. Images stay on their device; order and augmentation follow from (seed, epoch, step)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from doubly.data.augmentation import Augmentation
from doubly.data.images import Images
from doubly.data.pixels import in_unit_range
from doubly.errors import UsageError
from doubly.seeding import BatchGenerator, Rows, generator
from doubly.types import Batch


def steps_per_epoch(count: int, batch_size: int, world_size: int = 1) -> int:
    """Return the number of batches of an epoch.

    The last batch may be smaller. Images that the processes cannot share equally are left out.

    Args:
        count: Number of training images.
        batch_size: Images of a batch, over all processes.
        world_size: Number of processes.

    Raises:
        UsageError: The batch cannot be shared equally by the processes.
    """
    if batch_size < 1 or batch_size % world_size:
        raise UsageError(
            f"a global batch of {batch_size} cannot be shared by {world_size} processes: give a multiple of "
            f"{world_size}"
        )
    shared = count - count % world_size
    # A single left-over image is no batch: batch norm cannot normalize it. It is another one in every epoch.
    return -(-shared // batch_size) - (shared > batch_size and shared % batch_size == 1)


def batches(
    images: Images,
    batch_size: int,
    seed: int,
    epoch: int,
    *,
    augment: Augmentation | None = None,
    probabilities: Tensor | None = None,
    start: int = 0,
    channels_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """Yield the batches of one epoch, or this process's part of each.

    Args:
        images: The training images.
        batch_size: Images of a batch, over all processes.
        seed: Seed of the run.
        epoch: Number of the epoch; with the seed it decides the order.
        augment: Random change of each batch.
        probabilities: Probability of each class. Then each image of a batch is drawn with replacement: its class by
            these probabilities, and within the class uniformly. If None, each image comes once, in random order.
        start: Number of batches to skip.
        channels_last: Memory format of the pixels.
        rank: Number of this process.
        world_size: Number of processes, each of which gets an equal part of every batch.

    Returns:
        An iterator over batches with pixels in [0,1].

    Raises:
        UsageError: The batch cannot be shared equally, or the probabilities do not fit the classes.
    """
    steps = steps_per_epoch(len(images), batch_size, world_size)
    random = generator(seed, epoch, 0, "order")
    if probabilities is None:
        order = torch.randperm(len(images), generator=random)
    else:
        order = _sample_by_class(images, probabilities, random)
    order = order.to(images.x.device)
    as_stored = augment is not None and augment.moves_pixels  # uint8: a quarter of the memory to move
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def batch(step: int) -> Batch:
        rows = order[step * batch_size : (step + 1) * batch_size]
        share = len(rows) // world_size
        rows = rows[rank * share : (rank + 1) * share]
        x = images.stored_pixels(rows) if as_stored else images.pixels(rows)
        if augment is not None:
            numbers = BatchGenerator(generator(seed, epoch, step, "augment"), Rows(rank * share, world_size * share))
            x = augment(x, numbers)
        x = in_unit_range(x)
        return Batch(x.contiguous(memory_format=layout), images.y[rows], images.ids[rows])

    return map(batch, range(start, steps))


def _sample_by_class(images: Images, probabilities: Tensor, random: torch.Generator) -> Tensor:
    """Draw as many rows as there are images, with replacement: the class by its probability, then any image of it."""
    chances = probabilities.detach().cpu().double()
    counts = images.counts().cpu()
    if chances.shape != counts.shape:
        raise UsageError(
            f"sampling needs {len(counts)} class probabilities, got shape {tuple(chances.shape)}: give one per class"
        )
    if ((chances > 0) & (counts == 0)).any():
        raise UsageError("a class without images has a sampling probability above 0: set it to 0 or drop the class")
    labels = torch.multinomial(chances, len(images), replacement=True, generator=random)
    inside = (torch.rand(len(images), generator=random, dtype=torch.float64) * counts[labels]).long()
    by_class = images.y.cpu().argsort(stable=True)
    return by_class[(counts.cumsum(0) - counts)[labels] + inside]
