"""Imbalanced versions of a training set: rules that remove images of some classes, and files that list the rest."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from doubly.data.holdout import rank_within_class
from doubly.data.images import Images
from doubly.errors import UsageError
from doubly.rundir import read_json
from doubly.seeding import generator
from doubly.settings import Settings


class Imbalance(Settings):
    """A rule that selects the training images to keep; a subclass is a frozen dataclass with a method `keep`."""

    selects_by_id: ClassVar[bool] = False
    """True if the rule lists the ids of its images: then `Data.train_images` does not limit them further."""

    def keep(self, y: Tensor, classes: int, ids: Tensor | None = None) -> Tensor:
        """Select images.

        Args:
            y: Labels (N,).
            classes: Number of classes.
            ids: Positions of the images in the dataset they came from, (N,); 0, 1, … if None.

        Returns:
            Sorted indices of the images to keep, on the CPU.

        Raises:
            UsageError: A class would have no image.
        """
        raise NotImplementedError

    def check(self, images: Images) -> None:
        """Refuse training images that the rule does not fit. Called before anything is held out.

        Args:
            images: All training images of the dataset.

        Raises:
            UsageError: The rule was made for other images.
        """
        return  # most rules fit any images


@dataclass(frozen=True)
class Balanced(Imbalance):
    """Keep all images."""

    def keep(self, y: Tensor, classes: int, ids: Tensor | None = None) -> Tensor:
        return torch.arange(len(y))


@dataclass(frozen=True)
class StepImbalance(Imbalance):
    """Keep a share of the images in the first half of the classes, and all images in the second half.

    With an odd number of classes, the one in the middle keeps all its images.
    """

    ratio: float = 0.2
    """share of its images that a reduced class keeps, at least one image"""
    seed: int = 0
    """decides which images are kept"""
    of: Literal["own", "largest"] = "own"
    """own: a share of the images of the class itself; largest: at most that share of the largest class's number"""

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)

    def keep(self, y: Tensor, classes: int, ids: Tensor | None = None) -> Tensor:
        counts = _counts(y, classes)
        references = counts if self.of == "own" else [max(counts)] * classes
        reduced = [
            min(count, max(1, _share_of(reference, self.ratio)))
            for count, reference in zip(counts[: classes // 2], references, strict=False)
        ]
        return _keep_counts(y, [*reduced, *counts[classes // 2 :]], self.seed)


@dataclass(frozen=True)
class ExponentialImbalance(Imbalance):
    """Keep ratio^((C-1-k)/(C-1)) of class k of C: `ratio` of the first class, all of the last."""

    ratio: float = 0.2
    """share of its images that the first class keeps"""
    seed: int = 0
    """decides which images are kept"""

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)

    def keep(self, y: Tensor, classes: int, ids: Tensor | None = None) -> Tensor:
        last = max(1, classes - 1)
        counts = [_share_of(count, self.ratio ** ((last - k) / last)) for k, count in enumerate(_counts(y, classes))]
        return _keep_counts(y, counts, self.seed)


@dataclass(frozen=True)
class SelectedImages(Imbalance):
    """Keep the images whose ids are listed in a file, which `doubly data imbalance` writes."""

    file: str = "selected.json"
    """JSON file with the ids of each class under "kept"; a path relative to the working directory"""

    selects_by_id = True

    def keep(self, y: Tensor, classes: int, ids: Tensor | None = None) -> Tensor:
        ids_of_classes = list(self._read_ids().values())
        positions = (torch.arange(len(y)) if ids is None else ids).cpu()
        masks = [torch.isin(positions, torch.tensor(part, dtype=torch.int64)) for part in ids_of_classes]
        if len(masks) != classes or any((y.cpu()[mask] != label).any() for label, mask in enumerate(masks)):
            raise self._made_for_other_data()
        for label, mask in enumerate(masks):
            if not mask.any():
                raise UsageError(f"{self.file} leaves no image of class {label}: raise the ratio or hold out less")
        return torch.stack(masks).any(0).nonzero().squeeze(1)

    def check(self, images: Images) -> None:
        """Refuse images that lack one that the file lists, or that have other classes."""
        ids_of_classes = self._read_ids()
        listed = torch.tensor([k for part in ids_of_classes.values() for k in part], dtype=torch.int64)
        if tuple(ids_of_classes) != images.classes or not torch.isin(listed, images.ids.cpu()).all():
            raise self._made_for_other_data()
        self.keep(images.y, len(images.classes), images.ids)

    def _made_for_other_data(self) -> UsageError:
        return UsageError(
            f"{self.file} was made for other data: it lists images or classes that are not in this dataset; "
            "write a file for it with `doubly data imbalance NAME`"
        )

    def _read_ids(self) -> dict[str, list[int]]:
        if not Path(self.file).is_file():
            raise UsageError(
                f"there is no file {self.file} of selected images: write it with `doubly data imbalance NAME`"
            )
        content = read_json(Path(self.file))
        ids_of_classes = content.get("kept") if isinstance(content, dict) else None
        if not isinstance(ids_of_classes, dict) or not all(_is_ids(part) for part in ids_of_classes.values()):
            raise UsageError(f"{self.file} lists no selected images: write it with `doubly data imbalance NAME`")
        return ids_of_classes


def selection_file(images: Images, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file for `SelectedImages`.

    Args:
        images: The images to keep.
        about: Further entries of the file, such as how the images were selected.

    Raises:
        UsageError: Two classes have the same name.
    """
    ids = {name: images.ids[images.y == label].tolist() for label, name in enumerate(images.classes)}
    if len(ids) < len(images.classes):
        raise UsageError("two classes share a name, so that the file could not tell them apart: rename one")
    return {**about, "kept": ids}


def _is_ids(part: Any) -> bool:
    return type(part) is list and all(type(k) is int and 0 <= k < 2**62 for k in part)


def _check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise UsageError(f"an imbalance keeps a ratio in (0, 1] of the images of a class, got {ratio}")


def _counts(y: Tensor, classes: int) -> list[int]:
    counts: list[int] = torch.bincount(y, minlength=classes).tolist()
    if 0 in counts:
        raise UsageError(f"class {counts.index(0)} has no images to begin with: drop it before making an imbalance")
    return counts


def _share_of(count: int, share: float) -> int:
    """Return count * share, rounded down; the slack keeps 0.29 of 100 at 29, where the product is 28.999…"""
    return math.floor(count * share + 1e-9)


def _keep_counts(y: Tensor, counts: Sequence[int], seed: int) -> Tensor:
    """Select so many images of each class at random; with fewer, a part of the same images."""
    if 0 in counts:
        raise UsageError(f"the imbalance leaves no image of class {counts.index(0)}: raise the ratio or add images")
    rank = rank_within_class(y, generator(seed, 0, 0, "imbalance"))
    return (rank < torch.tensor(counts)[y.cpu()]).nonzero().squeeze(1)
