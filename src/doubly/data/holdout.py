"""Parts of a labeled set that keep its class proportions. All indices come sorted and on the CPU."""

import numpy as np
import torch
from torch import Tensor

from doubly.errors import UsageError
from doubly.seeding import generator


def rank_within_class(y: Tensor, random: torch.Generator) -> Tensor:
    """(N,): shuffle each class, and number its members 0, 1, …"""
    shuffled = torch.randperm(len(y), generator=random)
    by_class = shuffled[y.cpu()[shuffled].argsort(stable=True)]
    counts = torch.bincount(y.cpu())
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.empty_like(by_class).scatter_(0, by_class, torch.arange(len(y)) - first)


def first_of_each(y: Tensor, count: int) -> Tensor:
    """The first `count` images of each class, or all where it has fewer."""
    return (
        torch.cat([(y.cpu() == label).nonzero().squeeze(1)[:count] for label in range(int(y.max()) + 1)]).sort().values
    )


def stratified_folds(y: Tensor, folds: int, seed: int) -> list[Tensor]:
    """Disjoint parts that cover the set; both their sizes and their counts of any class differ by at most one."""
    if not 2 <= folds <= len(y):
        raise UsageError(f"{len(y)} images can be cut into 2 to {len(y)} folds, got folds={folds}")
    labels = y.cpu()
    counts = torch.bincount(labels)
    place = (counts.cumsum(0) - counts)[labels] + rank_within_class(labels, generator(seed, 0, 0, "folds"))
    # Dealing goes on from class to class, so that the remainders do not all land in the first folds.
    return [(place % folds == fold).nonzero().squeeze(1) for fold in range(folds)]


def holdout(y: Tensor, share: float, seed: int, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(kept, held): about `share` of each class is held out; if there are enough, each class stays among the kept.

    Images of one group, if there are groups, stay on one side; a group has images of one class.
    """
    if groups is not None:
        member = torch.from_numpy(np.unique(groups.cpu().numpy(), return_inverse=True)[1])
        label_of = torch.empty(int(member.max()) + 1, dtype=torch.int64).scatter_(0, member, y.cpu())
        kept_groups, held_groups = holdout(label_of, share, seed)
        kept, held = (torch.isin(member, part).nonzero().squeeze(1) for part in (kept_groups, held_groups))
        return kept, held
    size = round(share * len(y))
    if not (0 < share < 1 and 0 < size < len(y)):
        raise UsageError(
            f"the share held out lies inside (0, 1) and leaves images on both sides, got {share} of {len(y)}"
        )
    order = _representative_order(y, generator(seed, 0, 0, "holdout"))
    cut = len(y) - size
    return order[:cut].sort().values, order[cut:].sort().values


def stratified_subset(y: Tensor, size: int, seed: int) -> Tensor:
    """`size` indices (all, if there are fewer) in the proportions of the set, each class present if `size` allows."""
    if size < 1:
        raise UsageError(f"a validation has at least one image, got size={size}")
    return _representative_order(y, generator(seed, 0, 0, "validation"))[:size].sort().values


def _representative_order(y: Tensor, random: torch.Generator) -> Tensor:
    """One member of each class, and then an order of which any beginning has about the proportions of the whole."""
    labels = y.cpu()
    rank = rank_within_class(labels, random)
    quantile = (rank + 0.5) / torch.bincount(labels)[labels]
    return torch.where(rank == 0, 0.0, quantile).argsort(stable=True)
