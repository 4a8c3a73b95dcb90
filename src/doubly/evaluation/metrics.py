"""Accuracy per class, accuracy of the weakest classes (RA-Tail-30), and the confusion matrix."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from doubly.errors import UsageError
from doubly.settings import explained

Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Rounding = Literal["round", "floor", "ceil"]

ROUNDINGS: dict[str, Callable[[float], int]] = {
    "round": lambda count: math.floor(count + 0.5),  # half up; Python's round() goes to the even number
    "floor": math.floor,
    "ceil": math.ceil,
}


@explained
def per_class(correct: Bools, y: Ints, classes: int) -> Floats:
    """Return the accuracy of each class.

    Args:
        correct: Whether each sample is predicted correctly, (n,).
        y: Labels, (n,).
        classes: Number of classes.

    Returns:
        The share of correct samples, (classes,); NaN for a class without samples.

    Raises:
        UsageError: If a label is out of range, or the lengths differ.
    """
    _check_labels("labels", y, classes)
    _check_lengths(correct, y)
    hits = np.bincount(y, weights=correct, minlength=classes)
    counts = np.bincount(y, minlength=classes)
    accuracies: Floats = np.divide(hits, counts, out=np.full(classes, np.nan), where=counts > 0)
    return accuracies


@explained
def tail(accuracies: Floats, share: float = 0.3, rounding: Rounding = "round") -> tuple[float, Ints]:
    """Return the mean accuracy of the weakest classes, and which classes these are.

    Args:
        accuracies: Accuracy of each class; a class with NaN does not take part.
        share: Share of the classes that is the tail, in (0, 1].
        rounding: How that share becomes a number of classes; it is at least one.

    Returns:
        The mean, and the indices of the classes, weakest first; of equal ones the lower index comes first.

    Raises:
        UsageError: If the share or the rounding is not valid, or no class has samples.
    """
    if not 0 < share <= 1:
        raise UsageError(f"the tail is a share of the classes in (0, 1], got {share}: use 0.3 for RA-Tail-30")
    if rounding not in ROUNDINGS:
        raise UsageError(f"unknown rounding {rounding!r} of the tail: use one of {', '.join(ROUNDINGS)}")
    present = _classes_with_samples(accuracies)
    count = round(share * len(present), 9)  # 0.07 * 100 is 7.000000000000001, which is seven classes
    size = max(1, ROUNDINGS[rounding](count))
    weakest = present[np.argsort(accuracies[present], kind="stable")[:size]]
    return float(accuracies[weakest].mean()), weakest


@explained
def worst_class(accuracies: Floats) -> tuple[int, float]:
    """Return index and accuracy of the weakest class.

    Raises:
        UsageError: If no class has samples.
    """
    present = _classes_with_samples(accuracies)
    index = int(present[np.argmin(accuracies[present])])
    return index, float(accuracies[index])


@explained
def confusion(predictions: Ints, y: Ints, classes: int) -> npt.NDArray[np.int64]:
    """Return the confusion matrix: counts, (classes, classes), one row per label, one column per prediction.

    Raises:
        UsageError: If a label or prediction is out of range, or the lengths differ.
    """
    _check_labels("labels", y, classes)
    _check_labels("predictions", predictions, classes)
    _check_lengths(predictions, y)
    pairs = y.astype(np.int64) * classes + predictions
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return the names, with the class index added where several classes have the same."""
    used = {name for name in names if names.count(name) == 1}
    result = []
    for index, name in enumerate(names):
        if names.count(name) > 1:
            name = f"{name} ({index})"
            while name in used:
                name += "'"
            used.add(name)
        result.append(name)
    return result


def extended_names(classes: tuple[str, ...], highest: int) -> tuple[str, ...]:
    """Return the names of the data's classes, and numbers for further classes that the network predicted."""
    return (*classes, *(str(label) for label in range(len(classes), highest + 1)))


def nan_to_none(value: float) -> float | None:
    """Return None for NaN, which JSON does not have: the accuracy of a class without samples."""
    return None if math.isnan(value) else float(value)


def _classes_with_samples(accuracies: Floats) -> Ints:
    present = np.flatnonzero(~np.isnan(accuracies))
    if not len(present):
        raise UsageError("no class has a sample to measure accuracy on: evaluate on at least one image")
    return present


def _check_labels(name: str, values: Ints, classes: int) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < classes):
        raise UsageError(
            f"{name} range from {values.min()} to {values.max()}, but {classes} classes have the labels 0 to "
            f"{classes - 1}: check the number of classes"
        )


def _check_lengths(values: npt.NDArray[Any], y: Ints) -> None:
    if values.shape != y.shape:
        raise UsageError(f"{values.shape} values for {y.shape} labels: give one value per label")
