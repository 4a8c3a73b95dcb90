"""Reading the data of a run: training, held-out and test images."""

from pathlib import Path
from typing import NamedTuple

import torch

from doubly.data.config import Data
from doubly.data.holdout import first_of_each_class, holdout, stratified_subset
from doubly.data.images import Images, Splits
from doubly.distributed import Communicator, on_rank_zero
from doubly.errors import UsageError


def load_splits(data: Data, root: Path | str | None = None) -> Splits:
    """Read the training and test images of a dataset.

    Args:
        data: The dataset, and how many images of it to use (`train_images`, `test_per_class`).
        root: Folder with the dataset's files, instead of `data.root`.

    Returns:
        The images before anything is held out or made imbalanced. Images left out are mentioned in `note`.

    Raises:
        UsageError: Files are missing or damaged.
    """
    folder = data.root if root is None else root
    splits = data.source.load(None if folder is None else Path(folder))
    train, test, notes = splits.train, splits.test, [splits.note] if splits.note else []
    max_images = None if data.imbalance.selects_by_id else data.train_images
    if max_images is not None and max_images < len(train):
        notes.append(f"trained on {max_images:,} of {len(train):,} images, in the proportions of the classes")
        train = train.subset(stratified_subset(train.y, max_images, seed=0))
    if data.test_per_class is not None:
        indices = first_of_each_class(test.y, data.test_per_class)
        notes.append(f"tested on the first {data.test_per_class:,} images of each class, {len(indices):,} in all")
        test = test.subset(indices)
    return Splits(train, test, "; ".join(notes))


def load_splits_once(data: Data, communicator: Communicator) -> Splits:
    """Read the images as `load_splits` does; the first process goes ahead, so that a cache on disk is written once.

    Args:
        data: The dataset.
        communicator: The processes, all of which call this.

    Returns:
        The images, on every process.

    Raises:
        UsageError: Files are missing or damaged; all processes raise it.
    """
    if communicator.world_size > 1:
        on_rank_zero(communicator, lambda: load_splits(data), patient=True)
    return load_splits(data)


class TrainSplit(NamedTuple):
    """The training images of a dataset, divided: those to train on, and those held out (None without a hold-out)."""

    train: Images
    held_out: Images | None


def train_split(data: Data, splits: Splits) -> TrainSplit:
    """Hold out a part of the training images, and apply the imbalance to the rest.

    Args:
        data: Which images are held out (`holdout`, `split`), and the imbalance.
        splits: The images from `load_splits`.

    Raises:
        UsageError: The imbalance was made for other images, leaves a class empty, or the hold-out leaves a side empty.
    """
    train, held_out = splits.train, None
    data.imbalance.check(train)
    if data.holdout > 0:
        train_rows, held_out_rows = holdout(train.y, data.holdout, data.split, train.groups)
        train, held_out = train.subset(train_rows), train.subset(held_out_rows)
    indices = data.imbalance.keep(train.y, len(train.classes), train.ids)
    return TrainSplit(train.subset(indices) if len(indices) < len(train) else train, held_out)


class HoldoutParts(NamedTuple):
    """The held-out images, divided: those that methods learn from, and those that validate and select."""

    driver: Images | None
    validation: Images | None


def divide_holdout(data: Data, held_out: Images | None, method_learns: bool) -> HoldoutParts:
    """Set apart the held-out images that a method may learn from.

    Args:
        data: The share of them (`driver_share`), and which ones (`split`).
        held_out: The held-out images, or None.
        method_learns: Whether the method needs any.

    Returns:
        Both parts, without a common image; all images validate if none are needed or asked for.

    Raises:
        UsageError: If the method needs images and none are held out or set apart, or a part would be empty.
    """
    share = data.driver_share
    if held_out is None:
        if method_learns or share:
            reason = "the method learns from held-out images" if method_learns else "driver_share divides the hold-out"
            raise UsageError(f"{reason}, and nothing is held out: add --data.holdout 0.2 (in Python holdout=0.2)")
        return HoldoutParts(None, None)
    share = (0.5 if method_learns else 0.0) if share is None else share
    if share == 0:
        if method_learns:
            raise UsageError(
                "the method learns from held-out images, and driver_share is 0: add --data.driver-share 0.5"
            )
        return HoldoutParts(None, held_out)
    driver, validation = holdout(held_out.y, 1 - share, data.split, held_out.groups)
    first, second = held_out.subset(driver), held_out.subset(validation)
    check_disjoint(first, second)
    return HoldoutParts(first, second)


def check_disjoint(driver: Images, validation: Images) -> None:
    """Refuse images that a method learns from and that also validate it.

    Raises:
        UsageError: If an image is in both parts.
    """
    both = driver.ids[torch.isin(driver.ids, validation.ids)]
    if len(both):
        raise UsageError(
            f"{len(both)} images, such as number {int(both[0])}, would drive the method and validate it: give each "
            "image an id of its own"
        )
