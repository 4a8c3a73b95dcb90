"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): 28x28 gray images in idx files, gzipped or not."""

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from doubly.data.files import Files, content, labeled
from doubly.data.images import Images, Splits
from doubly.errors import UsageError

DIGITS = [str(digit) for digit in range(10)]
CLOTHES = ["T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]


@dataclass(frozen=True)
class MNIST:
    """70,000 handwritten digits, 28x28, gray."""

    def load(self, root: Path | None = None) -> Splits:
        return _splits("mnist", root, DIGITS, "mnist", "MNIST/raw")


@dataclass(frozen=True)
class FashionMNIST:
    """70,000 pieces of clothing, 28x28, gray."""

    def load(self, root: Path | None = None) -> Splits:
        return _splits("fashion_mnist", root, CLOTHES, "fashion_mnist", "FashionMNIST/raw")


def _splits(dataset: str, root: Path | None, classes: list[str], *places: str) -> Splits:
    files = Files(dataset, root, *places)
    return files.splits(_images(files, "train", classes), _images(files, "t10k", classes))


def _images(files: Files, part: str, classes: list[str]) -> Images:
    pixels, labels = (
        files.file(f"{part}-{what}-ubyte.gz", f"{part}-{what}-ubyte") for what in ("images-idx3", "labels-idx1")
    )
    x, y = _idx(pixels, 3), _idx(labels, 1)
    return labeled(pixels, x, y.astype(np.int64), classes)


def _idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Two zeros, 8 for bytes, the number of dimensions; each length as four bytes, big end first; the values."""
    raw: bytes = content(path, _raw, "an idx file")
    if len(raw) < 4 + 4 * dimensions or raw[:4] != bytes((0, 0, 8, dimensions)):
        raise UsageError(
            f"{path} is no idx file of bytes in {dimensions} dimensions: images and labels may be swapped; "
            "put it in again"
        )
    shape = [int(n) for n in np.frombuffer(raw, ">u4", dimensions, 4)]
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
    if len(values) != np.prod(shape, dtype=object):
        raise UsageError(f"{path} is cut short: it promises {shape} values and holds {len(values):,}; put it in again")
    return values.reshape(shape)


def _raw(path: Path) -> Any:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return file.read()
