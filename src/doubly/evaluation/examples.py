"""Attacked images to look at and to score elsewhere: exact arrays, or PNG files in whole gray levels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from doubly.data import Images
from doubly.errors import UsageError
from doubly.evaluation.config import Format
from doubly.evaluation.io import write_example_arrays, write_example_pictures
from doubly.threat import Threat, is_inside


class AttackedImages(NamedTuple):
    """Attacked images that are to be written.

    Attributes:
        attack: Name of the attack.
        rows: Positions of the images in the evaluation.
        x: The attacked images.
        threat: What the attack was allowed to do.
    """

    attack: str
    rows: Tensor
    x: Tensor
    threat: Threat


def check_format(format: str, channels: int) -> None:
    """Refuse a format that cannot hold images with so many channels.

    Raises:
        UsageError: If the format is unknown, or PNG for other than 1 or 3 channels.
    """
    if format not in get_args(Format):
        raise UsageError(f"attacked images are saved as {' or '.join(get_args(Format))}, got '{format}'")
    if format == "png" and channels not in (1, 3):
        raise UsageError(f"a PNG has 1 or 3 channels, these images have {channels}: save them as npz")


def quantized(attacked: Tensor, clean: Tensor, threat: Threat) -> Tensor:
    """Round attacked images to whole gray levels, without leaving the threat where it can be kept exactly."""
    levels = threat.clip_gray_levels((attacked * 255).round(), clean)
    return levels.clamp(0, 255) / 255


def gray_levels(images: Tensor) -> NDArray[np.uint8]:
    """Convert images (B, C, H, W) in [0, 1] to rounded gray levels (B, H, W, C)."""
    levels: NDArray[np.uint8] = (images * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return levels


def save_examples(
    folder: Path, format: Format, examples: AttackedImages, images: Images, predict: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Write attacked images, read them back, and predict what was read.

    Args:
        folder: Where to write; files of an earlier evaluation are removed.
        format: png or npz.
        examples: The attacked images.
        images: The clean images, labels and ids in the same order, on the network's device.
        predict: From images to classes.

    Returns:
        What evaluation.json keeps: the number of images, how many of those read back lie outside the threat, and the
        accuracy on them and before they were written.
    """
    check_format(format, examples.x.shape[1])
    clean, y, attacked = images.pixels(slice(None)), images.y, examples.x.to(images.y.device)
    if format == "npz":
        written = write_example_arrays(folder, attacked, y, images.ids)
    else:
        written = write_example_pictures(
            folder, gray_levels(quantized(attacked, clean, examples.threat)), y, images.ids
        )
    written = written.to(clean.device)
    return {
        "format": format,
        "n": len(y),
        "outside": int((~is_inside(examples.threat, written - clean)).sum()),
        "accuracy": float((predict(written) == y).float().mean()),
        "accuracy_before": float((predict(attacked) == y).float().mean()),
    }
