"""Images from whatever a user has: tensors, arrays, or a dataset of PyTorch."""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from doubly.data.images import Images, MapDataset
from doubly.data.pixels import split_item
from doubly.errors import UsageError

AnyImages = Images | tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]] | MapDataset | DataLoader[Any]
"""What `as_images` accepts: `Images`, a pair (pixels, labels), a map-style dataset, or a DataLoader."""


def as_images(data: AnyImages) -> Images:
    """Convert data to `Images`.

    Args:
        data: `Images`, which are returned as they are; a pair (pixels, labels) of tensors or arrays, as for
            `Images.of`; a map-style dataset, as for `Images.from_dataset`; or a DataLoader, whose dataset is read, or
            its batches (x, y) where it samples or collates in its own way.

    Returns:
        The images, in memory.

    Raises:
        UsageError: `data` is something else, or its pixels or labels are refused.
    """
    if isinstance(data, Images):
        return data
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Tensor | np.ndarray):
        return Images.of(*data)
    if isinstance(data, DataLoader):
        return as_images(cast(MapDataset, data.dataset)) if _reads_whole_dataset(data) else _from_batches(data)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise UsageError(
            f"images must be a pair (pixels, labels), doubly.Images or a map-style dataset, got "
            f"{type(data).__name__}: pass one of these, or a DataLoader"
        )
    return Images.from_dataset(data)


def _reads_whole_dataset(loader: DataLoader[Any]) -> bool:
    """Return whether the batches of a loader are the items of its dataset, each once, in whatever order."""
    plain = isinstance(loader.sampler, SequentialSampler | RandomSampler) and loader.collate_fn is default_collate
    return plain and hasattr(loader.dataset, "__len__") and hasattr(loader.dataset, "__getitem__")


def _from_batches(loader: DataLoader[Any]) -> Images:
    pairs = [split_item(batch) for batch in loader]
    if not pairs:
        raise UsageError("the DataLoader has no batches: check its dataset and its sampler")
    x, y = (torch.cat([torch.as_tensor(pair[part]) for pair in pairs]) for part in (0, 1))
    return Images.of(x, y, getattr(loader.dataset, "classes", None))
