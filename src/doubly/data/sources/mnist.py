"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): 28x28 gray images in idx files, gzipped or not."""

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from doubly.data.download.dataset_files import DatasetFiles, labeled_images, read_file
from doubly.data.images import DataSource, Images, Splits
from doubly.errors import UsageError
from doubly.reading import check_unpacked_size
from doubly.settings import Settings

MAX_GZIP_RATIO = 1100  # gzip makes nothing smaller than 1/1032
DIGITS = [str(digit) for digit in range(10)]
CLOTHES = ["T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]


@dataclass(frozen=True)
class MNIST(Settings, DataSource):
    """70,000 handwritten digits, 28x28, gray."""

    def load(self, root: Path | None = None) -> Splits:
        return _read_splits(DatasetFiles("mnist", root, "mnist", "MNIST/raw"), DIGITS)


@dataclass(frozen=True)
class FashionMNIST(Settings, DataSource):
    """70,000 pieces of clothing, 28x28, gray."""

    def load(self, root: Path | None = None) -> Splits:
        return _read_splits(DatasetFiles("fashion_mnist", root, "fashion_mnist", "FashionMNIST/raw"), CLOTHES)


def _read_splits(files: DatasetFiles, classes: list[str]) -> Splits:
    return files.splits(_read_images(files, "train", classes), _read_images(files, "t10k", classes))


def _read_images(files: DatasetFiles, part: str, classes: list[str]) -> Images:
    pixels, labels = (
        files.file(f"{part}-{kind}-ubyte.gz", f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")
    )
    x, y = _read_idx(pixels, 3), _read_idx(labels, 1)
    return labeled_images(pixels, x, y.astype(np.int64), classes)


def _read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file: two zeros, 8 for bytes, the number of dimensions, each length (big-endian), the values."""
    raw: bytes = read_file(path, _read_raw, "an idx file")
    if len(raw) < 4 + 4 * dimensions or raw[:4] != bytes((0, 0, 8, dimensions)):
        raise UsageError(
            f"{path} is no idx file of bytes in {dimensions} dimensions: images and labels may be swapped; "
            "replace it with the original"
        )
    shape = [int(n) for n in np.frombuffer(raw, ">u4", dimensions, 4)]
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
    if len(values) != np.prod(shape, dtype=object):
        raise UsageError(
            f"{path} is truncated: its header says {shape} and {len(values):,} values follow; replace it with the "
            "original"
        )
    return values.reshape(shape)


def _read_raw(path: Path) -> bytes:
    """Return the contents, of a gzipped file no more than its header declares and one byte."""
    if path.suffix != ".gz":
        return path.read_bytes()
    with gzip.open(path) as file:
        header = file.read(4)
        lengths = file.read(4 * min(header[3], 3)) if len(header) == 4 else b""
        declared = math.prod(int(n) for n in np.frombuffer(lengths, ">u4", len(lengths) // 4))
        if declared > MAX_GZIP_RATIO * path.stat().st_size:
            return header + lengths  # which says that the file is truncated
        check_unpacked_size(path, declared)
        return header + lengths + file.read(declared + 1)
