"""Imbalanced versions of a training set: the first classes lose images, the last keep theirs (A18, A19)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from doubly.data.holdout import rank_within_class
from doubly.errors import UsageError
from doubly.seeding import generator


@runtime_checkable
class Imbalance(Protocol):
    def keep(self, y: Tensor, classes: int, ids: Tensor | None = None) -> Tensor:
        """Sorted indices of the images that stay; `ids` are their positions in the source's set, 0, 1, … if none."""
        ...


@dataclass(frozen=True)
class Balanced:
    """All images stay, in the proportions of the source."""

    def keep(self, y: Tensor, classes: int, ids: Tensor | None = None) -> Tensor:
        return torch.arange(len(y))


@dataclass(frozen=True)
class StepImbalance:
    """The first half of the classes keeps `ratio` of its images, the other half (with the middle class) all of them."""

    ratio: float = 0.2
    """share of its own images that a reduced class keeps, at least one"""
    seed: int = 0
    """which images stay"""
    of: Literal["own", "largest"] = "own"
    """own: a share of the class's own images; largest: at most that share of those of the largest class (A19)"""

    def __post_init__(self) -> None:
        _check(self.ratio)

    def keep(self, y: Tensor, classes: int, ids: Tensor | None = None) -> Tensor:
        counts = _counts(y, classes)
        wholes = counts if self.of == "own" else [max(counts)] * classes
        reduced = [
            min(count, max(1, _part(whole, self.ratio)))
            for count, whole in zip(counts[: classes // 2], wholes, strict=False)
        ]
        return _draw(y, [*reduced, *counts[classes // 2 :]], self.seed)


@dataclass(frozen=True)
class ExponentialImbalance:
    """Class k of C keeps n_k ratio^((C-1-k)/(C-1)): from `ratio` of the first class to all of the last."""

    ratio: float = 0.2
    """share of its own images that the first class keeps"""
    seed: int = 0
    """which images stay"""

    def __post_init__(self) -> None:
        _check(self.ratio)

    def keep(self, y: Tensor, classes: int, ids: Tensor | None = None) -> Tensor:
        last = max(1, classes - 1)
        quotas = [_part(count, self.ratio ** ((last - k) / last)) for k, count in enumerate(_counts(y, classes))]
        return _draw(y, quotas, self.seed)


def _check(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise UsageError(f"an imbalance keeps a ratio in (0, 1] of the images of a class, got {ratio}")


def _counts(y: Tensor, classes: int) -> list[int]:
    counts: list[int] = torch.bincount(y, minlength=classes).tolist()
    if 0 in counts:
        raise UsageError(f"class {counts.index(0)} has no images to begin with: drop it before making an imbalance")
    return counts


def _part(count: int, share: float) -> int:
    """Rounded down; the slack keeps 0.29 of 100 at 29 where the product is 28.999…"""
    return math.floor(count * share + 1e-9)


def _draw(y: Tensor, quotas: Sequence[int], seed: int) -> Tensor:
    if 0 in quotas:
        raise UsageError(f"the imbalance leaves no image of class {quotas.index(0)}: raise the ratio or add images")
    rank = rank_within_class(y, generator(seed, 0, 0, "imbalance"))
    return (rank < torch.tensor(quotas)[y.cpu()]).nonzero().squeeze(1)
