"""Folders of images: one directory per class, any size and format."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from doubly.data.download.dataset_files import data_folder
from doubly.data.holdout import holdout
from doubly.data.images import DataSource, Images, Splits
from doubly.data.sources.decoding import SUFFIXES, Fit, check_image_settings, decode_image, decode_images, image_size
from doubly.data.sources.shards import cache_key, open_shards
from doubly.errors import UsageError
from doubly.settings import Settings

TRAIN, TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")


class _Files(NamedTuple):
    """The image files of a folder, with their labels."""

    paths: list[Path]
    y: Tensor
    classes: tuple[str, ...]


@dataclass(frozen=True)
class ImageFolder(Settings, DataSource):
    """Images in `ROOT/train/CLASS` and `ROOT/test/CLASS`; or in `ROOT/CLASS`, a part of which becomes the test set."""

    path: str = "."
    """folder, inside the data root"""
    size: int | None = None
    """width and height in pixels that every image is resized to; none: all images have one size already, and keep it"""
    fit: Fit = "crop"
    """how an image becomes square: crop cuts from its middle, stretch changes its proportions"""
    test_share: float = 0.2
    """part of each class that is the test set where there is no folder `test` or `val`; always the same images"""
    memory: float | None = None
    """GiB that the images may take in memory; none: half of the free memory.
    If they need more, they are decoded once into files on disk, from which batches are read"""

    def __post_init__(self) -> None:
        check_image_settings(self.size, self.test_share)
        if self.memory is not None and not self.memory >= 0:
            raise UsageError(f"memory is a number of GiB, got {self.memory}")

    def load(self, root: Path | None = None) -> Splits:
        folder = Path(root or ".") / self.path
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}: name it with --data-root, or as the path inside that")
        train_folder, test_folder = _subfolder(folder, TRAIN), _subfolder(folder, TEST)
        if train_folder is None or test_folder is None:
            images = self._read(_list_files(folder))
            train, test = holdout(images.y, self.test_share, seed=0)
            return Splits(images.subset(train), images.subset(test))
        train_files, test_files = _list_files(train_folder), _list_files(test_folder)
        if train_files.classes != test_files.classes:
            odd = sorted(set(train_files.classes) ^ set(test_files.classes))[0]
            raise UsageError(
                f"{train_folder} and {test_folder} have different classes, '{odd}' is in one of them only: add it to "
                "the other, or remove it"
            )
        return Splits(self._read(train_files), self._read(test_files))

    def _read(self, files: _Files) -> Images:
        """Decode the files into memory, or into a cache on disk if they need too much of it."""
        paths, y, classes = files
        shape = decode_image(paths[0], self.size, self.fit).shape
        chunks = decode_images(paths, self.size, self.fit)
        if len(paths) * math.prod(shape) <= (free_memory() / 2 if self.memory is None else self.memory * 2**30):
            x = torch.empty(len(paths), *shape, dtype=torch.uint8)
            filled = 0
            for chunk in chunks:
                x[filled : filled + len(chunk)] = torch.from_numpy(chunk)
                filled += len(chunk)
            return Images(x, y, classes)
        stats = ((str(path.resolve()), path.stat()) for path in paths)
        name = cache_key((self.size, self.fit, *((where, stat.st_size, stat.st_mtime_ns) for where, stat in stats)))
        return Images(open_shards(data_folder() / "shards" / name, chunks, len(paths)), y, classes)


def image_sizes(source: ImageFolder, root: Path | None, most: int = 200) -> tuple[list[tuple[int, int]], int]:
    """Read the sizes of some images of a folder, without decoding them.

    Args:
        source: The folder.
        root: The data root.
        most: How many images to look at; they are spread over all of them.

    Returns:
        Width and height of each of these, and the number of all training images.

    Raises:
        UsageError: If there is no such folder, or it has no class folders with images.
    """
    folder = Path(root or ".") / source.path
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}: name a folder that contains a folder of images for each class")
    train, test = _subfolder(folder, TRAIN), _subfolder(folder, TEST)
    files = _list_files(folder if train is None or test is None else train)
    count = len(files.paths) if train and test else round(len(files.paths) * (1 - source.test_share))
    return [image_size(path) for path in files.paths[:: -(-len(files.paths) // most)]], count


def _subfolder(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first subfolder with one of these names, in upper or lower case, or None."""
    subfolders = {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_dir()}
    return next((subfolders[name] for name in names if name in subfolders), None)


def _list_files(folder: Path) -> _Files:
    """List the image files of each class, in the order of their names."""
    classes = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    splits = [name for name in classes if name.lower() in {*TRAIN, *TEST}]
    # A class may be called train, among bus and tram; but then it contains images, not folders of them.
    if splits and (
        len(splits) == len(classes) or any(p.is_dir() for name in splits for p in (folder / name).iterdir())
    ):
        raise UsageError(f"{folder} contains {', '.join(splits)}, which is no class: name the parts train and test")
    if len(classes) < 2:
        raise UsageError(
            f"{folder} needs a directory for each of two or more classes, it has {len(classes)}: make one directory "
            "per class"
        )
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        of_class = sorted(_image_files(folder / name))
        if not of_class:
            raise UsageError(f"{folder / name} has no images ({', '.join(sorted(SUFFIXES))}): add some or remove it")
        paths += of_class
        labels += [label] * len(of_class)
    return _Files(paths, torch.tensor(labels), tuple(classes))


def _image_files(folder: Path) -> Iterator[Path]:
    """Yield the image files below a folder, without hidden ones and those in hidden folders."""
    return (
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def free_memory() -> float:
    """Return the bytes of memory that can be used without swapping, or a cautious guess where Linux does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return 4.0 * 2**30
