"""The images of a repair: held out of training, divided into those that fit and those that judge, never test images."""

import hashlib
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from doubly.data import Data, Images, Splits, load_splits, train_split
from doubly.data.holdout import holdout, stratified_subset
from doubly.data.splits import divide_holdout
from doubly.errors import UsageError
from doubly.evaluation.intervals import wilson
from doubly.offsets.config import RepairConfig

FEW_IMAGES = 50  # of a class, below which the uncertainty of its error is mentioned
MAX_NAMED = 5  # classes that a message names
MAX_TEST_SHARE = 0.01  # datasets contain a few duplicates; more test images than that among the held-out are a mistake
HOW_TO = "train with --data.holdout 0.1, or call repair(model, held_out, …) with other images"


class RepairImages(NamedTuple):
    """Disjoint parts of the held-out images.

    Attributes:
        fit: The images that the offsets are fitted on.
        judge: The images that the result is judged on.
        notes: What a reader of the result must know.
    """

    fit: Images
    judge: Images
    notes: list[str]


def held_out_images(data: Data, *, trained_here: bool, method_learns: bool = False) -> tuple[Images, Splits, list[str]]:
    """Return the training images of a dataset that a network has not been trained on and nothing is selected on.

    These are the hold-out, or of a divided one the driver's part; without a hold-out, the training images that
    `train_images` leaves out.

    Args:
        data: The data of the run.
        trained_here: Whether the network was trained on `data`. If not, all training images are taken where none are
            held out, and a note says so.
        method_learns: Whether the method learned from held-out images, so that the hold-out is divided.

    Returns:
        The images, the dataset, and notes.

    Raises:
        UsageError: If there are none.
    """
    splits = load_splits(data)
    held_out = train_split(data, splits).held_out
    driver, validation = divide_holdout(data, held_out, method_learns)
    if driver is not None:
        return driver, splits, [f"held-out images: the {len(driver):,} of the driver's part; the others only select"]
    if validation is not None:
        return validation, splits, []
    every = load_splits(replace(data, train_images=None)).train
    unused = every.subset(~torch.isin(every.ids, splits.train.ids))
    if len(unused):
        return unused, splits, [f"held-out images: the {len(unused):,} training images that the run leaves out"]
    if trained_here:
        raise UsageError(
            "the run was trained on all training images and holds none out, and test images may not be used to fit: "
            f"{HOW_TO}"
        )
    note = (
        f"held-out images: all {len(splits.train):,} training images of the dataset; if the network was trained on "
        "them, its errors there are too small: name a part by --set data.holdout=0.1, or other images"
    )
    return splits.train, splits, [note]


def validation_images(data: Data, *, method_learns: bool) -> Images:
    """Return the held-out images that neither a method nor a repair learns from.

    Raises:
        UsageError: If there are none.
    """
    held_out = train_split(data, load_splits(data)).held_out
    driver, validation = divide_holdout(data, held_out, method_learns)
    if validation is None:
        raise UsageError("the run holds no images out, so that none can validate: train with --data.holdout 0.2")
    if driver is None:
        raise UsageError(
            "the run does not divide its hold-out, so that the offsets would be fitted on the images that validate "
            "them: train with --data.driver-share 0.5, or use --split test"
        )
    return validation


def without_test_images(held_out: Images, test: Images | None) -> tuple[Images, list[str]]:
    """Return the held-out images without those that are also test images, pixel by pixel, and notes.

    Raises:
        UsageError: If more than a hundredth of them are test images.
    """
    if test is None:
        return held_out, []
    test_images = set(_checksums(test))
    among = np.array([checksum in test_images for checksum in _checksums(held_out)])
    count = int(among.sum())
    if count > MAX_TEST_SHARE * len(held_out):
        raise UsageError(
            f"{count:,} of the {len(held_out):,} held-out images are test images: offsets fitted on them would be "
            f"judged by themselves; {HOW_TO}"
        )
    if count == 0:
        return held_out, []
    return held_out.subset(~among), [f"{count} held-out images that are also test images were left out"]


def divide(held_out: Images, config: RepairConfig) -> RepairImages:
    """Divide held-out images into those that fit and those that judge, class by class.

    Raises:
        UsageError: If there is one class only, or there are too few images to divide.
    """
    labels = len(torch.unique(held_out.y))
    if labels < 2:
        raise UsageError(
            f"the held-out images are of {labels} class ({_images(len(held_out))}): offsets shift the decision between "
            f"classes, so give images of at least two; {HOW_TO}"
        )
    fit, judge = (
        held_out.subset(rows) for rows in holdout(held_out.y, 1 - config.fit_share, config.seed, held_out.groups)
    )
    fit = fit.subset(stratified_subset(fit.y, config.images, config.seed))
    judge = judge.subset(stratified_subset(judge.y, config.judge_images, config.seed))
    if (left := len(torch.unique(fit.y))) < 2:
        raise UsageError(
            f"{_images(len(fit))} of {left} class would be left to fit on, of {len(held_out):,} held out, and offsets "
            "shift the decision between classes: hold out more, or raise images or fit_share"
        )
    missing = [name for name, count in zip(fit.classes, fit.counts().tolist(), strict=True) if count == 0]
    notes = [f"no held-out images to fit on of {_listed(missing)}: the offset stays 0"] if missing else []
    return RepairImages(fit, judge, notes)


def notes_on_few_images(fit: Images, errors: torch.Tensor) -> list[str]:
    """Return a note about the classes with few images to fit on, with the interval of the error of the smallest.

    Args:
        fit: The images that the offsets were fitted on.
        errors: Error of each class on them under attack, (classes,).
    """
    counts = fit.counts()
    few = ((counts > 0) & (counts < FEW_IMAGES)).nonzero().flatten().tolist()
    if not few:
        return []
    smallest = min(few, key=lambda label: int(counts[label]))
    count, error = int(counts[smallest]), float(errors[smallest])
    low, high = wilson(round(error * count), count)
    return [
        f"fewer than {FEW_IMAGES} images to fit on of {_listed([fit.classes[label] for label in few])}: of the error "
        f"of {fit.classes[smallest]} ({_images(count)}) they say only that it lies in {low:.0%} to {high:.0%}, so its "
        "offset is uncertain"
    ]


def _images(count: int) -> str:
    return f"{count:,} image{'s' * (count != 1)}"


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    shown = ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"class {shown}" if len(names) == 1 else f"{len(names)} classes ({shown})"


def _checksums(images: Images) -> list[bytes]:
    """Return a checksum of the pixels of each image in [0, 1], whatever type they are stored in."""
    checksums = []
    for start in range(0, len(images), 256):
        pixels = (images.pixels(slice(start, start + 256)) * 255).round().to(torch.uint8).cpu().numpy()
        checksums += [hashlib.sha256(image.tobytes()).digest() for image in pixels]
    return checksums
