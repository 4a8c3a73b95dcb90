"""Labeled images in memory: pixels as the source stores them, labels, class names, and where each image came from."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor

from doubly.bilevel.arguments import check_arguments, show
from doubly.data.mapped_pixels import MappedPixels
from doubly.data.pixels import channels_first, check_labels, check_pixels, class_names, in_unit_range, split_item
from doubly.errors import UsageError
from doubly.settings import Settings
from doubly.text import utf8


class MapDataset(Protocol):
    """A map-style dataset: a length, and (image, label) pairs by position, such as torchvision's datasets."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Images(Settings):
    """A labeled set of images.

    Make one with `Images.of` or `Images.from_dataset`, which check their arguments; the constructor looks at types.

    Args:
        x: Pixels (N, C, H, W): uint8, or float32 in [0,1] where the source is finer than 8 bits.
        y: Labels (N,), int64, numbered from 0.
        classes: Names of the classes, by label; bytes of folder names that are not UTF-8 become backslash escapes.
        ids: Position of each image in the dataset it came from, (N,) int64; 0, 1, … by default. A subset keeps the
            ids of its images.
        groups: Group of each image, (N,) int64, such as the frames of one film. Images of one group are never
            separated by a hold-out. None if the images are independent.

    Raises:
        UsageError: If one of them is of another type, or labels and ids are no vectors.
    """

    x: Tensor | MappedPixels
    y: Tensor
    classes: tuple[str, ...]
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        for name, values in (("labels", self.y), ("ids", self.ids)):
            if values.dim() != 1:
                raise UsageError(f"{name} are a tensor (N,), got {show(values)}: use Images.of, which makes them")
        object.__setattr__(self, "classes", tuple(utf8(name) for name in self.classes))
        if len(self.ids) == 0:
            object.__setattr__(self, "ids", torch.arange(len(self.y), device=self.y.device))

    @staticmethod
    def of(
        x: Tensor | NDArray[Any], y: Tensor | NDArray[Any] | Sequence[int], classes: Sequence[str] | None = None
    ) -> "Images":
        """Make a set from tensors or arrays.

        Args:
            x: Pixels (N, C, H, W), or (N, H, W) without color; uint8, or floats in [0,1].
            y: Labels (N,), integers from 0.
            classes: Names of the classes; "0", "1", … up to the highest label by default.

        Returns:
            The images, on the device of `x`.

        Raises:
            UsageError: Pixels or labels have another type, shape or range, their numbers differ or are 0, or a
                label has no class name.
        """
        check_arguments(Images.of, {"classes": classes}, UsageError)
        pixels, labels = check_pixels(x), check_labels(y)
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
        """Read a map-style dataset once, into memory.

        Args:
            dataset: Yields (image, label) pairs, or dicts such as {"image": …, "label": …} of Hugging Face: tensors
                (C, H, W), arrays (H, W, C) or PIL images, all of one shape. If it has an attribute `classes`, these
                are the names of the classes.

        Returns:
            The images, in the order of the dataset.

        Raises:
            UsageError: The dataset is empty, its images differ in shape, or `Images.of` refuses them.
        """
        if len(dataset) == 0:
            raise UsageError("the dataset has no images: check its folder and its split")
        pairs = [split_item(dataset[position]) for position in range(len(dataset))]
        pixels = [channels_first(image) for image, _ in pairs]
        if len(shapes := {tuple(image.shape) for image in pixels}) > 1:
            raise UsageError(
                f"the images of a dataset must have one shape, got {sorted(shapes)[:3]}: resize them in its transform"
            )
        labels: list[Any] = [label.item() if isinstance(label, Tensor) else label for _, label in pairs]
        return Images.of(torch.stack(pixels), labels, class_names(dataset))

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.x.shape[1:]))
        return f"Images({len(self):,} of {shape}, {self.x.dtype}, {len(self.classes)} classes)"

    def subset(self, indices: Tensor | NDArray[Any] | Sequence[int]) -> "Images":
        """Select images.

        Args:
            indices: Positions, in the order wanted, or a boolean mask (N,).

        Returns:
            The selected images, with their ids and groups.
        """
        index = torch.as_tensor(indices, device=self.y.device)
        index = index if index.dtype is torch.bool else index.long()
        x = self.x[index] if isinstance(self.x, Tensor) else self.x.subset(index)
        groups = None if self.groups is None else self.groups[index]
        return Images(x, self.y[index], self.classes, self.ids[index], groups)

    def pixels(self, indices: Tensor | slice) -> Tensor:
        """Return pixels as float32 in [0,1].

        Args:
            indices: Positions, a boolean mask, or a slice.

        Returns:
            Pixels (n, C, H, W), on the device of the images.
        """
        return in_unit_range(self.stored_pixels(indices))

    def stored_pixels(self, indices: Tensor | slice) -> Tensor:
        """Return the pixels of the images at `indices`, in the type in which they are stored."""
        if isinstance(self.x, MappedPixels) or isinstance(indices, slice) or indices.dtype is torch.bool:
            return self.x[indices]
        return self.x.index_select(0, indices)  # ten times as fast as indexing

    def counts(self) -> Tensor:
        """Return the number of images of each class."""
        return torch.bincount(self.y, minlength=len(self.classes))

    def channel_statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the mean and the standard deviation of each channel, of pixels in [0,1]."""
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
        """Return the images on another `device`."""
        groups = None if self.groups is None else self.groups.to(device)
        return Images(self.x.to(device), self.y.to(device), self.classes, self.ids.to(device), groups)

    def sha256(self) -> str:
        """Return a checksum of pixels, labels and class names; the ids do not count."""
        digest = hashlib.sha256(repr((self.x.dtype, tuple(self.x.shape), self.classes)).encode())
        for chunk in self._chunks():
            digest.update(chunk.cpu().numpy().tobytes())
        digest.update(self.y.cpu().numpy().tobytes())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Return a checksum of labels, ids and at most 2,048 of the images: quick for a set of any size."""
        rows = torch.linspace(0, len(self) - 1, min(len(self), 2048), dtype=torch.float64).long()
        digest = hashlib.sha256(repr((tuple(self.x.shape), self.classes)).encode())
        # 64 at a time: images may be large.
        sample = (self.stored_pixels(part.to(self.y.device)) for part in torch.split(rows, 64))
        for part in chain((self.y, self.ids), sample):
            digest.update(part.cpu().numpy().tobytes())
        return digest.hexdigest()

    def _chunks(self) -> Iterator[Tensor]:
        """Yield about a million pixels at a time: a float64 copy of a uint8 set takes eight times its memory."""
        rows = max(1, 2**20 // self.x.shape[1:].numel())
        return (self.x[start : start + rows] for start in range(0, len(self), rows))


@dataclass(frozen=True, eq=False)
class Splits:
    """Training and test images of a dataset, with the same classes and image shape.

    Args:
        train: Images to train on.
        test: Images to test on.
        note: How they differ from the published dataset, in one line; empty if they do not.

    Raises:
        UsageError: The classes or the image shapes differ.
    """

    train: Images
    test: Images
    note: str = ""

    def __post_init__(self) -> None:
        if self.train.classes != self.test.classes or self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise UsageError(
                f"train and test must agree in classes and image shape, got {len(self.train.classes)} and "
                f"{len(self.test.classes)} classes, {tuple(self.train.x.shape[1:])} and "
                f"{tuple(self.test.x.shape[1:])}: pass the same `classes` to both and resize"
            )


@runtime_checkable
class DataSource(Protocol):
    """A dataset, before it is read: anything with a method `load` (examples/your_dataset.py).

    Ours are frozen dataclasses whose fields are the settings of the reader.
    """

    @abstractmethod
    def load(self, root: Path | None) -> Splits:
        """Read the training and test images.

        Args:
            root: Folder with the dataset's files; None for the source's default. A source without files ignores it.

        Raises:
            UsageError: Files are missing or damaged; the message says how to get them.
        """
        ...
