"""Tar files of images in the format of WebDataset: KEY.jpg (or another image format) and KEY.cls with its label."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray

from doubly.data.download.dataset_files import read_file
from doubly.data.download.unpack import BLOCK, open_members
from doubly.data.holdout import holdout
from doubly.data.images import DataSource, Images, Splits
from doubly.data.sources.decoding import SUFFIXES, Fit, check_image_settings, decode_image
from doubly.data.sources.folder import free_memory
from doubly.errors import UsageError
from doubly.settings import Settings

SHARDS = (".tar", ".tar.gz")
TEST = ("test", "val", "valid", "validation", "eval")
MAX_FILE_BYTES = 2**26  # of one image
MAX_LABEL_BYTES, MAX_LABEL = 20, 100_000
MAX_SHARDS = 100_000


@dataclass(frozen=True)
class TarShards(Settings, DataSource):
    """Tar files of images and labels as WebDataset has them: KEY.jpg and KEY.cls; read safely, without unpacking."""

    path: str = "."
    """folder of .tar files, one file, or several as in 'shards/{000..003}.tar', inside the data root"""
    size: int | None = None
    """width and height in pixels that every image is resized to; none: all images have one size already, and keep it"""
    fit: Fit = "crop"
    """how an image becomes square: crop cuts from its middle, stretch changes its proportions"""
    test_share: float = 0.2
    """part of each class that is the test set where no file is named test or val; always the same images"""
    classes: tuple[str, ...] = ()
    """names of the classes; by default numbers"""

    def __post_init__(self) -> None:
        check_image_settings(self.size, self.test_share)

    def load(self, root: Path | None = None) -> Splits:
        files = list_shards(Path(root or "."), self.path)
        test_files = [file for file in files if _is_test(file)]
        parts = [[file for file in files if not _is_test(file)], test_files]
        read = [self._read(part) if part else ([], []) for part in parts]
        highest = max(label for _, labels in read for label in labels)
        classes = self.classes or tuple(str(label) for label in range(highest + 1))
        if highest >= len(classes):
            raise UsageError(
                f"{files[0].parent} has the label {highest} and there are {len(classes)} classes: name all"
            )
        images = [Images(torch.from_numpy(np.stack(x)), torch.tensor(y), classes) for x, y in read if x]
        if len(images) == 2:
            return Splits(images[0], images[1])
        train, test = holdout(images[0].y, self.test_share, seed=0)
        return Splits(images[0].subset(train), images[0].subset(test))

    def _read(self, files: Sequence[Path]) -> tuple[list[NDArray[np.uint8]], list[int]]:
        pixels: list[NDArray[np.uint8]] = []
        labels: list[int] = []
        limit = free_memory() / 2
        for file in files:
            for image, label in self._samples(file):
                if pixels and image.shape != pixels[0].shape:
                    raise UsageError(
                        f"{file} has an image of {image.shape[2]}x{image.shape[1]} pixels among others of "
                        f"{pixels[0].shape[2]}x{pixels[0].shape[1]}: give the size to resize them to, "
                        "--data.source.size 32 in train, --set size=32 in other verbs"
                    )
                pixels.append(image)
                if len(pixels) * image.nbytes > limit:
                    raise UsageError(
                        f"the images up to {file} take more than half of the free memory: resize them (size=64), name "
                        "fewer files, or unpack them into a folder of class folders, which is read from disk"
                    )
                labels.append(label)
        if not pixels:
            raise UsageError(f"{files[0]} has no images KEY.jpg with labels KEY.cls: write them with WebDataset")
        return pixels, labels

    def _samples(self, file: Path) -> Iterator[tuple[NDArray[np.uint8], int]]:
        """Yield the image and the label of each sample of a file, in its order."""
        found: dict[str, dict[str, bytes]] = {}
        for name, suffix, content in read_file(file, lambda path: list(_contents(path)), "a tar file"):
            found.setdefault(name, {})["cls" if suffix == ".cls" else "image"] = content
        for name, sample in found.items():
            if set(sample) != {"cls", "image"}:
                lacks = "image" if "cls" in sample else "label (.cls)"
                raise UsageError(f"{file} has no {lacks} for the sample '{name:.60}': give each image a label")
            label = sample["cls"].decode("ascii", "replace").strip()
            if not re.fullmatch(r"\d{1,6}", label) or int(label) > MAX_LABEL:
                raise UsageError(
                    f"{file} has the label '{label:.20}' for '{name:.60}': a .cls file holds one whole number"
                )
            yield decode_image(file / name, self.size, self.fit, sample["image"]), int(label)


def list_shards(root: Path, pattern: str) -> list[Path]:
    """Return the tar files of a folder, of one name, or of several names written with {000..003}.

    Raises:
        UsageError: If there are none, or one is missing.
    """
    folder = root / pattern
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.name.endswith(SHARDS) and path.is_file())
        if not files:
            raise UsageError(f"{folder} has no .tar files: name a folder with some, or 'shards/{{000..003}}.tar'")
        return files
    files = [root / name for name in _expanded(pattern)]
    if missing := [file for file in files if not file.is_file()]:
        raise UsageError(f"there is no file {missing[0]} of the {len(files)} that '{pattern}' names: check the numbers")
    return files


def is_shards(path: Path, name: str) -> bool:
    """Return whether --data names tar files: a pattern, one file, or a folder that has some and no class folders."""
    if path.is_dir():
        return any(file.name.endswith(SHARDS) for file in path.iterdir())
    return name.endswith(SHARDS)


def _expanded(pattern: str) -> list[str]:
    """Return the names that a pattern with ranges such as {000..003} stands for."""
    match = re.search(r"\{(\d{1,9})\.\.(\d{1,9})\}", pattern)
    if match is None:
        return [pattern]
    first, last = int(match[1]), int(match[2])
    if not first <= last < first + MAX_SHARDS:
        raise UsageError(f"'{pattern}' names files from {first} to {last}: write the smaller number first")
    numbers = (str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return [
        name for number in numbers for name in _expanded(pattern[: match.start()] + number + pattern[match.end() :])
    ]


def _is_test(file: Path) -> bool:
    words = re.split(r"[^a-z]+", f"{file.parent.name}/{file.name}".lower())
    return any(word in TEST for word in words)


def _contents(file: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield key, suffix and content of the images and labels in a tar file; other members are passed over."""
    for name, source in open_members(file):
        path = PurePosixPath(name)
        key, dot, extension = path.name.partition(".")
        suffix = f".{extension.lower()}"
        if dot and key and (suffix == ".cls" or suffix in SUFFIXES):
            limit = MAX_LABEL_BYTES if suffix == ".cls" else MAX_FILE_BYTES
            yield str(path.with_name(key)), suffix, _read_bounded(source, limit, f"{file}: '{name:.60}'")


def _read_bounded(source: IO[bytes], limit: int, what: str) -> bytes:
    content = bytearray()
    while part := source.read(BLOCK):
        content += part
        if len(content) > limit:
            raise UsageError(f"{what} is larger than {limit:,} bytes: it is no sample of WebDataset; leave it out")
    return bytes(content)
