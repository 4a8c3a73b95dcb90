"""Parts of a labeled set that keep its class proportions. Every index tensor is sorted and on the CPU."""

import numpy as np
import torch
from torch import Tensor

from doubly.errors import UsageError
from doubly.seeding import generator


def rank_within_class(y: Tensor, random: torch.Generator) -> Tensor:
    """Shuffle each class, number its members 0, 1, …, and return each image's number, (N,)."""
    shuffled = torch.randperm(len(y), generator=random)
    by_class = shuffled[y.cpu()[shuffled].argsort(stable=True)]
    counts = torch.bincount(y.cpu())
    start = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.empty_like(by_class).scatter_(0, by_class, torch.arange(len(y)) - start)


def first_of_each_class(y: Tensor, count: int) -> Tensor:
    """Return the indices of the first `count` images of each class, or of all where a class has fewer."""
    return (
        torch.cat([(y.cpu() == label).nonzero().squeeze(1)[:count] for label in range(int(y.max()) + 1)]).sort().values
    )


def stratified_folds(y: Tensor, folds: int, seed: int) -> list[Tensor]:
    """Cut a set into disjoint folds whose sizes, and whose counts of any class, differ by at most one.

    Args:
        y: Labels (N,).
        folds: Number of folds, 2 to N.
        seed: Decides which images are in which fold.

    Returns:
        The indices of each fold.

    Raises:
        UsageError: The number of folds is impossible.
    """
    if not 2 <= folds <= len(y):
        raise UsageError(f"{len(y)} images can be cut into 2 to {len(y)} folds, got folds={folds}")
    labels = y.cpu()
    counts = torch.bincount(labels)
    position = (counts.cumsum(0) - counts)[labels] + rank_within_class(labels, generator(seed, 0, 0, "folds"))
    # Positions continue from class to class, so that the remainders do not all land in the first folds.
    return [(position % folds == fold).nonzero().squeeze(1) for fold in range(folds)]


def holdout(y: Tensor, share: float, seed: int, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Divide a set into images to train on and images to hold out, class by class.

    Args:
        y: Labels (N,).
        share: Part of each class to hold out, in (0, 1).
        seed: Decides which images are held out.
        groups: Group of each image (N,), each with images of one class; the images of a group stay together.

    Returns:
        The indices to train on and the indices held out. Every class is among the first, if they are enough.

    Raises:
        UsageError: The share would leave no image on one side.
    """
    if groups is not None:
        member = torch.from_numpy(np.unique(groups.cpu().numpy(), return_inverse=True)[1])
        label_of = torch.empty(int(member.max()) + 1, dtype=torch.int64).scatter_(0, member, y.cpu())
        train, held_out = (torch.isin(member, part).nonzero().squeeze(1) for part in holdout(label_of, share, seed))
        return train, held_out
    size = round(share * len(y))
    if not (0 < share < 1 and 0 < size < len(y)):
        raise UsageError(
            f"the share held out lies inside (0, 1) and leaves images on both sides, got {share} of {len(y)}: "
            + _remedy(len(y))
        )
    order = _representative_order(y, generator(seed, 0, 0, "holdout"))
    cut = len(y) - size
    return order[:cut].sort().values, order[cut:].sort().values


def stratified_subset(y: Tensor, size: int, seed: int) -> Tensor:
    """Select images in the class proportions of the set.

    Args:
        y: Labels (N,).
        size: Number of images; all, if there are fewer.
        seed: Decides which images are selected.

    Returns:
        The indices; every class is among them, if `size` allows.

    Raises:
        UsageError: `size` is below 1.
    """
    if size < 1:
        raise UsageError(f"a subset has at least one image, got size={size}")
    # The purpose names the random stream: another word would select other images.
    return _representative_order(y, generator(seed, 0, 0, "probe"))[:size].sort().values


def _remedy(count: int) -> str:
    if count < 2:
        return "one image cannot be divided, so give more images, or hold out more where these come from"
    return f"give a share of at least {1 / count:.2g} and at most {1 - 1 / count:.2g}, or more images"


def _representative_order(y: Tensor, random: torch.Generator) -> Tensor:
    """Return an order that begins with one image of each class and of which any prefix is about stratified."""
    labels = y.cpu()
    rank = rank_within_class(labels, random)
    quantile = (rank + 0.5) / torch.bincount(labels)[labels]
    return torch.where(rank == 0, 0.0, quantile).argsort(stable=True)
