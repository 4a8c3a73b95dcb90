"""Images from whatever a user has: tensors, arrays, or a dataset of PyTorch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from doubly.data.images import Images, MapDataset
from doubly.errors import UsageError

AnyImages = Images | tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]] | MapDataset
"""What `as_images` accepts: `Images`, a pair (pixels, labels), or a map-style dataset."""


def as_images(data: AnyImages) -> Images:
    """Convert data to `Images`.

    Args:
        data: `Images`, which are returned as they are; a pair (pixels, labels) of tensors or arrays, as for
            `Images.of`; or a map-style dataset, as for `Images.from_dataset`.

    Returns:
        The images, in memory.

    Raises:
        UsageError: `data` is something else, such as a DataLoader, or its pixels or labels are refused.
    """
    if isinstance(data, Images):
        return data
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor | np.ndarray):
        return Images.of(*data)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise UsageError(
            f"images must be a pair (pixels, labels), doubly.Images or a map-style dataset, got "
            f"{type(data).__name__}: of a DataLoader pass its dataset"
        )
    return Images.from_dataset(data)
