"""Accuracy on corrupted images in the format of CIFAR-10-C: NAME.npy with five severities in turn, and labels.npy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from doubly.data import Images
from doubly.data.holdout import stratified_subset
from doubly.distributed import SINGLE_PROCESS, Communicator
from doubly.errors import UsageError
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.intervals import wilson
from doubly.evaluation.memory import MicrobatchLimit
from doubly.evaluation.metrics import Floats, distinct_names, nan_to_none, per_class, tail
from doubly.evaluation.predict import predict

SEVERITIES = 5


@dataclass(frozen=True, eq=False)
class CorruptedImages:
    """The files of a folder, mapped and not read; all have the images of each severity in the order of the labels.

    Attributes:
        folder: The folder.
        pixels: uint8 (5 n, H, W, C), by the name of the corruption.
        labels: Labels of one severity, (n,).
    """

    folder: Path
    pixels: dict[str, NDArray[np.uint8]]
    labels: NDArray[Any]


def open_corruptions(folder: Path, images: Images) -> CorruptedImages:
    """Open a folder of corrupted images, and check that it fits the clean ones; nothing in it is executed.

    Args:
        folder: The folder, with labels.npy and a file for each corruption.
        images: The clean images.

    Raises:
        UsageError: If a file is missing, damaged or does not fit.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}: unpack CIFAR-10-C.tar or CIFAR-100-C.tar, and name its folder")
    names = sorted(path.stem for path in folder.glob("*.npy") if path.stem != "labels")
    if not names or not (folder / "labels.npy").is_file():
        raise UsageError(f"{folder} needs labels.npy and a file such as fog.npy for each corruption, as CIFAR-10-C has")
    labels = _mapped(folder / "labels.npy")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels):
        raise UsageError(
            f"{folder / 'labels.npy'} must hold one whole number per image, got {labels.dtype} {labels.shape}"
        )
    pixels = {name: _mapped(folder / f"{name}.npy") for name in names}
    shape = (*images.x.shape[2:], images.x.shape[1])
    count = len(pixels[names[0]]) if pixels[names[0]].ndim else 0
    for name, array in pixels.items():
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1:] != shape or len(array) != count:
            raise UsageError(
                f"{folder / f'{name}.npy'} has {array.dtype} of shape {array.shape}, and needs uint8 of shape "
                f"({count}, {', '.join(map(str, shape))}) as the images of the data: give corruptions of this data"
            )
    if count == 0 or count % SEVERITIES or len(labels) not in (count, count // SEVERITIES):
        raise UsageError(
            f"{folder} has {count} images and {len(labels)} labels: it needs five severities of each image"
        )
    labels = np.array(labels[: count // SEVERITIES], dtype=np.int64)
    if labels.min() < 0 or labels.max() >= len(images.classes):
        raise UsageError(
            f"{folder / 'labels.npy'} has labels from {labels.min()} to {labels.max()} and the data "
            f"{len(images.classes)} classes: give corruptions of this data"
        )
    return CorruptedImages(folder, pixels, labels)


def _mapped(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise UsageError(f"{path} cannot be read as an array ({error!s:.80}): fetch it again") from None


def corruption_accuracies(
    model: nn.Module,
    corrupted: CorruptedImages,
    classes: Sequence[str],
    config: EvalConfig,
    communicator: Communicator = SINGLE_PROCESS,
    limit: MicrobatchLimit | None = None,
) -> dict[str, Any]:
    """Return the accuracy under each corruption and severity, as evaluation.json keeps it.

    Args:
        model: The network.
        corrupted: The images.
        classes: Names of the classes.
        config: Number of images of each severity, chunk size and tail.
        communicator: The processes that share the work.
        limit: How many images fit into memory at a time.
    """
    n = len(corrupted.labels)
    rows = np.arange(n)
    if config.images is not None and config.images < n:
        rows = stratified_subset(torch.from_numpy(corrupted.labels), config.images, seed=0).numpy()
    y = corrupted.labels[rows]
    parts: dict[str, Any] = {}
    totals: list[Floats] = []
    for name, pixels in corrupted.pixels.items():
        by_severity = []
        for severity in range(SEVERITIES):
            channels_first = np.ascontiguousarray(pixels[severity * n + rows].transpose(0, 3, 1, 2))
            images = Images(torch.from_numpy(channels_first), torch.from_numpy(y), tuple(classes))
            settings: dict[str, Any] = {"chunk_size": config.chunk_size, "communicator": communicator, "limit": limit}
            predicted = predict(model, images, {}, **settings).classes["clean"]
            by_severity.append((predicted == y).astype(np.float64))
        parts[name] = _summary(by_severity, y, len(classes), config)
        totals += by_severity
    mean = np.mean(totals, axis=0)  # of each image over corruptions and severities
    accuracies = _per_class(mean, y, len(classes))
    value, weakest = tail(accuracies, config.tail_share, config.tail_rounding)
    names = distinct_names(classes)
    return {
        "folder": str(corrupted.folder),
        "n": len(y),
        "accuracy": float(mean.mean()),
        "tail": nan_to_none(value),
        "tail_classes": [names[index] for index in weakest],
        "per_class": {name: nan_to_none(float(accuracies[index])) for index, name in enumerate(names)},
        "corruptions": parts,
    }


def _summary(by_severity: list[Floats], y: NDArray[Any], classes: int, config: EvalConfig) -> dict[str, Any]:
    tails = [
        tail(per_class(correct > 0, y, classes), config.tail_share, config.tail_rounding)[0] for correct in by_severity
    ]
    return {
        "accuracy": float(np.mean(by_severity)),
        "tail": nan_to_none(
            tail(_per_class(np.mean(by_severity, axis=0), y, classes), config.tail_share, config.tail_rounding)[0]
        ),
        "severities": [float(correct.mean()) for correct in by_severity],
        "intervals": [list(wilson(int(correct.sum()), len(y))) for correct in by_severity],
        "tails": [nan_to_none(value) for value in tails],
    }


def _per_class(values: Floats, y: NDArray[Any], classes: int) -> Floats:
    counts = np.bincount(y, minlength=classes)
    with np.errstate(invalid="ignore"):
        return np.bincount(y, weights=values, minlength=classes) / counts
