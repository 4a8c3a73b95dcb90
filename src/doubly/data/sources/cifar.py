"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 32x32 color images, as Python batches or as binary batches."""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from doubly.data.download.dataset_files import DatasetFiles, labeled_images, read_bytes, read_file, read_words
from doubly.data.images import DataSource, Images, Splits
from doubly.data.sources.pickles import read_batch
from doubly.errors import UsageError
from doubly.settings import Settings

PIXELS = 3 * 32 * 32
CIFAR10_BATCHES = 5


class _Part(NamedTuple):
    """The images and labels of one file."""

    path: Path
    x: NDArray[np.uint8]
    y: Any


@dataclass(frozen=True)
class CIFAR10(Settings, DataSource):
    """60,000 color photographs, 32x32, of 10 classes; 5,000 training and 1,000 test images of each."""

    batches: int = CIFAR10_BATCHES
    """how many of the five training batches of 10,000 images are read, from the first on"""

    def __post_init__(self) -> None:
        if not 1 <= self.batches <= CIFAR10_BATCHES:
            raise UsageError(f"CIFAR-10 has {CIFAR10_BATCHES} training batches, got batches={self.batches}")

    def load(self, root: Path | None = None) -> Splits:
        binary = DatasetFiles("cifar10", root, "cifar-10-batches-bin")
        files = DatasetFiles("cifar10", root, "cifar-10-batches-py")
        if files.find("data_batch_1") or not binary.find("data_batch_1.bin"):
            classes = _class_names(files.file("batches.meta"), "label_names")
            parts = [
                _read_python(self._file(files, f"data_batch_{k}", k), "labels", f"training batch {k} of 5")
                for k in range(1, self.batches + 1)
            ]
            test = _read_python(files.file("test_batch"), "labels", "testing batch 1 of 1")
        else:
            files = binary
            classes = read_file(files.file("batches.meta.txt"), read_words, "class names")
            parts = [_read_binary(self._file(files, f"data_batch_{k}.bin", k), 1) for k in range(1, self.batches + 1)]
            test = _read_binary(files.file("test_batch.bin"), 1)
        for one, other in combinations([*parts, test], 2):  # binary batches do not contain their number
            if np.array_equal(one.x, other.x):
                raise UsageError(
                    f"{one.path} and {other.path} have the same images: replace both with the original files"
                )
        return files.splits(_join(parts, classes), _join([test], classes))

    def _file(self, files: DatasetFiles, name: str, number: int) -> Path:
        count = number - 1
        fewer = (
            f"read only the first {count}: --data.source.batches {count} of doubly train, else --set batches={count}"
        )
        return files.file(name, remedy=fewer) if number > 1 else files.file(name)


@dataclass(frozen=True)
class CIFAR100(Settings, DataSource):
    """60,000 color photographs, 32x32, of 100 classes; 500 training and 100 test images of each."""

    def load(self, root: Path | None = None) -> Splits:
        files = DatasetFiles("cifar100", root, "cifar-100-python", "cifar-100-binary")
        if files.find("train") or not files.find("train.bin"):
            classes = _class_names(files.file("meta"), "fine_label_names")
            train = _read_python(files.file("train"), "fine_labels", "training batch 1 of 1")
            test = _read_python(files.file("test"), "fine_labels", "testing batch 1 of 1")
        else:
            classes = read_file(files.file("fine_label_names.txt"), read_words, "class names")
            train, test = (_read_binary(files.file(f"{name}.bin"), 2) for name in ("train", "test"))
        return files.splits(_join([train], classes), _join([test], classes))


def _class_names(path: Path, key: str) -> list[str]:
    meta = read_file(path, read_batch, "CIFAR's class names")
    try:
        return [name.decode("utf-8") if isinstance(name, bytes) else str(name) for name in meta[key]]
    except (KeyError, TypeError, UnicodeDecodeError):
        raise UsageError(f"{path} has no {key}: replace it with CIFAR's original file") from None


def _read_python(path: Path, labels: str, expected: str) -> _Part:
    """Read a pickled batch whose labels are under the key `labels` and whose title is `expected`."""
    batch = read_file(path, read_batch, "a CIFAR batch")
    title = batch.get("batch_label", expected.encode())
    title = title.decode("latin1") if isinstance(title, bytes) else title
    if not isinstance(title, str) or title != expected:
        raise UsageError(
            f"{path} contains {title!r:.60}, expected is '{expected}': rename the files to their original names"
        )
    x, y = batch.get("data"), batch.get(labels)
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != PIXELS or not isinstance(y, list):
        raise UsageError(
            f"{path} is no CIFAR batch: it lacks rows of {PIXELS} bytes as data, or {labels}; replace it with the "
            "original"
        )
    return _Part(path, x, y)


def _read_binary(path: Path, label_bytes: int) -> _Part:
    """Read records of a label (CIFAR-100: coarse, then fine) and the pixels."""
    raw = read_file(path, read_bytes, "a binary CIFAR batch")
    record = label_bytes + PIXELS
    if len(raw) == 0 or len(raw) % record:
        raise UsageError(
            f"{path} is truncated: its {len(raw):,} bytes are no multiple of {record}; replace it with the original"
        )
    rows = raw.reshape(-1, record)
    return _Part(path, rows[:, label_bytes:], rows[:, label_bytes - 1])


def _join(parts: list[_Part], classes: list[str]) -> Images:
    sets = [labeled_images(part.path, part.x.reshape(-1, 3, 32, 32), part.y, classes) for part in parts]
    return Images(torch.cat([images.x[:] for images in sets]), torch.cat([images.y for images in sets]), tuple(classes))
