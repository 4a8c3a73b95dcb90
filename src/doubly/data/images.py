"""Labeled images in memory: pixels as the source stores them, labels, class names, and where each image came from."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from doubly.data.mapped import Mapped
from doubly.errors import UsageError


class MapDataset(Protocol):
    """Anything with a length and (image, label) pairs by position, such as torchvision's datasets."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Images:
    """A labeled set of images. `Images.of` and `Images.from_dataset` check what they get; the constructor trusts."""

    x: Tensor | Mapped  # (N, C, H, W), uint8, or float32 in [0,1] where the source has finer gray levels
    y: Tensor  # (N,) int64
    classes: tuple[str, ...]
    # (N,) int64, positions in the source's set, by default 0, 1, …; a subset keeps them, so they may exceed its length
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    groups: Tensor | None = None  # (N,) int64: images of one group, as frames of one film, are held out together

    def __post_init__(self) -> None:
        if len(self.ids) == 0:
            object.__setattr__(self, "ids", torch.arange(len(self.y), device=self.y.device))

    @staticmethod
    def of(
        x: Tensor | NDArray[Any], y: Tensor | NDArray[Any] | Sequence[int], classes: Sequence[str] | None = None
    ) -> "Images":
        """From pixels (N, C, H, W) or (N, H, W), uint8 or floats in [0,1], and labels; names default to "0", "1", …"""
        pixels, labels = _checked_pixels(x), _checked_labels(y)
        if len(pixels) != len(labels) or len(labels) == 0:
            raise UsageError(f"got {len(pixels)} images and {len(labels)} labels: give equally many, and at least one")
        low, high = int(labels.min()), int(labels.max())
        names = tuple(str(k) for k in range(high + 1)) if classes is None else tuple(classes)
        if low < 0 or high >= len(names):
            raise UsageError(
                f"labels reach from {low} to {high}, allowed is 0 to {len(names) - 1}: number the classes from 0 "
                f"and name all of them"
            )
        return Images(pixels, labels.to(pixels.device), names)

    @staticmethod
    def from_dataset(dataset: MapDataset) -> "Images":
        """Reads a map-style dataset once; its `classes`, where it has them, become the names."""
        if len(dataset) == 0:
            raise UsageError("the dataset has no images: check its folder and its split")
        pairs = [dataset[position] for position in range(len(dataset))]
        pixels = [_channels_first(image) for image, _ in pairs]
        if len(shapes := {tuple(image.shape) for image in pixels}) > 1:
            raise UsageError(
                f"the images of a dataset share one shape, got {sorted(shapes)[:3]}: resize them in its transform"
            )
        labels: list[Any] = [label.item() if isinstance(label, Tensor) else label for _, label in pairs]
        return Images.of(torch.stack(pixels), labels, getattr(dataset, "classes", None))

    def __len__(self) -> int:
        return len(self.y)

    def subset(self, indices: Tensor | NDArray[Any] | Sequence[int]) -> "Images":
        """The images at these positions, in this order; or those where a boolean mask is true."""
        index = torch.as_tensor(indices, device=self.y.device)
        index = index if index.dtype is torch.bool else index.long()
        x = self.x.subset(index) if isinstance(self.x, Mapped) else self.x[index]
        groups = None if self.groups is None else self.groups[index]
        return Images(x, self.y[index], self.classes, self.ids[index], groups)

    def pixels(self, indices: Tensor | slice) -> Tensor:
        """These images as float32 in [0,1]."""
        return in_unit_range(self.taken(indices))

    def taken(self, indices: Tensor | slice) -> Tensor:
        """These images as they are stored."""
        if isinstance(self.x, Mapped) or isinstance(indices, slice) or indices.dtype is torch.bool:
            return self.x[indices]
        return self.x.index_select(0, indices)  # ten times as fast as indexing

    def counts(self) -> Tensor:
        """Images per class."""
        return torch.bincount(self.y, minlength=len(self.classes))

    def channel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, of pixels in [0,1]."""
        total = torch.zeros(self.x.shape[1], dtype=torch.float64)
        squares = torch.zeros_like(total)
        for chunk in self._chunks():
            values = chunk.cpu().double()
            total += values.sum((0, 2, 3))
            squares += values.square().sum((0, 2, 3))
        scale = 255 if self.x.dtype is torch.uint8 else 1
        size = self.x.numel() // self.x.shape[1]
        mean = total / size
        std = (squares / size - mean.square()).clamp(min=0).sqrt()
        return tuple((mean / scale).tolist()), tuple((std / scale).tolist())

    def to(self, device: torch.device | str) -> "Images":
        groups = None if self.groups is None else self.groups.to(device)
        return Images(self.x.to(device), self.y.to(device), self.classes, self.ids.to(device), groups)

    def sha256(self) -> str:
        """Of pixels, labels and class names; not of the ids, which say where and not what."""
        digest = hashlib.sha256(repr((self.x.dtype, tuple(self.x.shape), self.classes)).encode())
        for chunk in self._chunks():
            digest.update(chunk.cpu().numpy().tobytes())
        digest.update(self.y.cpu().numpy().tobytes())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Of labels, ids and some of the pixels: enough to tell another set, and quick on one of any size."""
        rows = torch.linspace(0, len(self) - 1, min(len(self), 2048), dtype=torch.float64).long()
        digest = hashlib.sha256(repr((tuple(self.x.shape), self.classes)).encode())
        few = (self.taken(part.to(self.y.device)) for part in torch.split(rows, 64))  # at a time: images may be large
        for part in chain((self.y, self.ids), few):
            digest.update(part.cpu().numpy().tobytes())
        return digest.hexdigest()

    def _chunks(self) -> Iterator[Tensor]:
        """About a million pixels at a time: a float64 copy of a whole uint8 set would take eight times its memory."""
        rows = max(1, 2**20 // self.x.shape[1:].numel())
        return (self.x[first : first + rows] for first in range(0, len(self), rows))


def in_unit_range(x: Tensor) -> Tensor:
    """Bytes as floats in [0,1]; floats as they are."""
    return x.float().div_(255) if x.dtype is torch.uint8 else x


@dataclass(frozen=True, eq=False)
class Splits:
    """What a source gives: a set to train on and one to test on, alike in classes and image shape."""

    train: Images
    test: Images
    note: str = ""  # what makes them other than the published set, in one line

    def __post_init__(self) -> None:
        if self.train.classes != self.test.classes or self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise UsageError(
                f"train and test must agree in classes and image shape, got {len(self.train.classes)} and "
                f"{len(self.test.classes)} classes, {tuple(self.train.x.shape[1:])} and "
                f"{tuple(self.test.x.shape[1:])}: pass the same `classes` to both and resize"
            )


@runtime_checkable
class DataSource(Protocol):
    """Where data come from; `root` is the folder of files, which a source without files leaves alone."""

    def load(self, root: Path | None) -> Splits: ...


def _tensor(values: Tensor | NDArray[Any]) -> Tensor:
    # torch warns about arrays it may not write to and refuses negative strides: these two are copied.
    if isinstance(values, Tensor):
        return values
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def _checked_pixels(x: Tensor | NDArray[Any]) -> Tensor:
    if not isinstance(x, Tensor) and x.dtype.kind not in "buif":
        raise UsageError(f"images must be uint8 or floats in [0,1], got {x.dtype}: convert them to uint8")
    pixels = _tensor(x).detach()
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels
    if pixels.ndim != 4 or 0 in pixels.shape[1:]:
        raise UsageError(f"images have shape (N, C, H, W), or (N, H, W) without color; got {tuple(pixels.shape)}")
    if pixels.shape[1] > 4 >= pixels.shape[3]:
        raise UsageError(
            f"images of shape {tuple(pixels.shape)} look like (N, H, W, C), allowed is (N, C, H, W): "
            f"permute(0, 3, 1, 2) them"
        )
    if pixels.dtype is torch.uint8:
        return pixels.contiguous()
    if not pixels.is_floating_point():
        raise UsageError(f"images must be uint8 or floats in [0,1], got {pixels.dtype}: convert them to uint8")
    low, high = (float(bound) for bound in pixels.aminmax()) if len(pixels) else (0.0, 1.0)
    if not (low >= 0 and high <= 1):  # in this form NaN fails too
        raise UsageError(
            f"images must be floats in [0,1] or uint8, these reach from {low:g} to {high:g}: "
            f"divide gray levels by 255, and leave normalization to the model's first layer"
        )
    return pixels.float().contiguous()


def _checked_labels(y: Tensor | NDArray[Any] | Sequence[int]) -> Tensor:
    try:
        labels = np.asarray(y.tolist() if isinstance(y, Tensor) else y)
    except ValueError:  # rows of different lengths
        labels = np.asarray(None)
    if labels.ndim != 1 or (labels.dtype.kind not in "iu" and len(labels)):
        raise UsageError(
            f"labels are one integer per image, got {labels.dtype} of shape {labels.shape}: "
            f"pass class numbers, not names, scores or one-hot rows"
        )
    return torch.from_numpy(labels.astype(np.int64))


def _channels_first(image: Any) -> Tensor:
    """Tensors come as (C, H, W), arrays and PIL images as (H, W, C), as in torchvision; gray ones as (H, W)."""
    if isinstance(image, Tensor):
        return image[None] if image.ndim == 2 else image
    if getattr(image, "mode", "RGB") not in ("L", "RGB"):  # palettes and 16 bits would pass as gray levels
        raise UsageError(
            f"PIL images must be of mode 'L' or 'RGB', got {image.mode!r}: convert('RGB') in the transform"
        )
    array = np.asarray(image)
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] > 4:
        raise UsageError(
            f"a dataset's arrays are images of shape (H, W) or (H, W, C), got {array.shape}: "
            f"transpose them, or give (C, H, W) tensors"
        )
    return _tensor(array.transpose(2, 0, 1))
