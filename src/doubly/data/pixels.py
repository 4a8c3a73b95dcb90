"""Conversion and checks of raw pixels and labels, before they become `Images`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from doubly.checks import count_nan_images
from doubly.errors import UsageError
from doubly.settings import explained

MAX_CHANNELS = 4  # gray, color, and either with transparency
IMAGE_KEYS = ("image", "img", "images", "pixel_values", "x")  # of datasets whose items are dicts
LABEL_KEYS = ("label", "labels", "target", "fine_label", "y")


def in_unit_range(x: Tensor) -> Tensor:
    """Return uint8 pixels as float32 in [0,1], and floating-point pixels as they are."""
    return x.float().div_(255) if x.dtype is torch.uint8 else x


@explained
def check_pixels(x: Tensor | NDArray[Any]) -> Tensor:
    """Return pixels as a contiguous tensor (N, C, H, W), uint8 or float32 in [0,1].

    Args:
        x: Pixels (N, C, H, W), or (N, H, W) without color; uint8, or floats in [0,1].

    Returns:
        The pixels; uint8 stays uint8, any floating-point type becomes float32.

    Raises:
        UsageError: The type, the shape or the range is another one.
    """
    if not isinstance(x, Tensor) and x.dtype.kind not in "buif":
        raise UsageError(f"images must be uint8 or floats in [0,1], got {x.dtype}: convert them to uint8")
    pixels = as_tensor(x).detach()
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels
    if pixels.ndim != 4 or 0 in pixels.shape[1:]:
        raise UsageError(f"images must have shape (N, C, H, W), or (N, H, W) without color; got {tuple(pixels.shape)}")
    if pixels.shape[1] > MAX_CHANNELS >= pixels.shape[3]:
        raise UsageError(
            f"images of shape {tuple(pixels.shape)} look like (N, H, W, C), but must be (N, C, H, W): "
            f"permute(0, 3, 1, 2) them"
        )
    if pixels.dtype is torch.uint8:
        return pixels.contiguous()
    if not pixels.is_floating_point():
        raise UsageError(f"images must be uint8 or floats in [0,1], got {pixels.dtype}: convert them to uint8")
    low, high = (float(bound) for bound in pixels.aminmax()) if len(pixels) else (0.0, 1.0)
    if not (low >= 0 and high <= 1):  # in this form NaN fails too
        if bad := count_nan_images(pixels):
            raise UsageError(
                f"images must be floats in [0,1] or uint8, and {bad} of {len(pixels)} have NaN pixels: remove or "
                "repair them"
            )
        raise UsageError(
            f"images must be floats in [0,1] or uint8, got values from {low:g} to {high:g}: "
            f"divide gray levels by 255, and leave normalization to the model's first layer"
        )
    return pixels.float().contiguous()


@explained
def check_labels(y: Tensor | NDArray[Any] | Sequence[int]) -> Tensor:
    """Return labels as an int64 tensor (N,) on the CPU.

    Raises:
        UsageError: The labels are not one integer per image.
    """
    try:
        labels = np.asarray(y.tolist() if isinstance(y, Tensor) else y)
    except ValueError:  # rows of different lengths
        labels = np.asarray(None)
    if labels.ndim == 0 and labels.dtype.kind in "iu":
        raise UsageError(
            f"labels must be one integer per image, got {labels}: of a single image give x[None] and [label]"
        )
    if labels.ndim != 1 or (labels.dtype.kind not in "iu" and len(labels)):
        raise UsageError(
            f"labels must be one integer per image, got {labels.dtype} of shape {labels.shape}: "
            f"pass class numbers, not names, scores or one-hot rows"
        )
    return torch.from_numpy(labels.astype(np.int64))


def channels_first(image: Any) -> Tensor:
    """Return one image of a dataset as a tensor (C, H, W).

    Args:
        image: A tensor (C, H, W), or an array or PIL image (H, W, C), as in torchvision; without color, (H, W).

    Raises:
        UsageError: The shape is another one, or a PIL image is neither gray nor RGB.
    """
    if isinstance(image, Tensor):
        return image[None] if image.ndim == 2 else image
    if getattr(image, "mode", "RGB") not in ("L", "RGB"):  # palettes and 16 bits would pass as gray levels
        raise UsageError(
            f"PIL images must be of mode 'L' or 'RGB', got {image.mode!r}: convert('RGB') in the transform"
        )
    array = np.asarray(image)
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] > MAX_CHANNELS:
        raise UsageError(
            f"the arrays of a dataset must have shape (H, W) or (H, W, C), got {array.shape}: "
            f"transpose them, or return (C, H, W) tensors"
        )
    return as_tensor(array.transpose(2, 0, 1))


def as_tensor(values: Tensor | NDArray[Any]) -> Tensor:
    """Return an array as a tensor, copied only where torch cannot share its memory."""
    if isinstance(values, Tensor):
        return values
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    # torch warns about read-only arrays and refuses negative strides.
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def split_item(item: Any) -> tuple[Any, Any]:
    """Return image and label of an item of a dataset, or of a batch.

    Args:
        item: A pair (image, label), or a dict with one of `IMAGE_KEYS` and one of `LABEL_KEYS`.

    Raises:
        UsageError: It is something else.
    """
    if isinstance(item, Mapping):
        image, label = (next((key for key in keys if key in item), None) for keys in (IMAGE_KEYS, LABEL_KEYS))
        if image is not None and label is not None:
            return item[image], item[label]
        raise UsageError(
            f"an item of the dataset has the keys {', '.join(map(str, item))}: name the image one of "
            f"{', '.join(IMAGE_KEYS)}, and the label one of {', '.join(LABEL_KEYS)}"
        )
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise UsageError(f"an item of a dataset is a pair (image, label) or a dict, got {type(item).__name__}")


def class_names(dataset: Any) -> Sequence[str] | None:
    """Return the names of a dataset's classes: `classes`, or those of a label of Hugging Face; None without names."""
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping):
        label = next((features[key] for key in LABEL_KEYS if key in features), None)
        return getattr(label, "names", None)
    names: Sequence[str] | None = getattr(dataset, "classes", None)
    return names
