"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 32x32 color images, as python batches or as binary batches."""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from doubly.data.files import Files, bytes_of, content, labeled, words
from doubly.data.images import Images, Splits
from doubly.data.pickles import read_batch
from doubly.errors import UsageError

PIXELS = 3 * 32 * 32


class _Part(NamedTuple):
    path: Path
    x: NDArray[np.uint8]
    y: Any


@dataclass(frozen=True)
class CIFAR10:
    """60,000 photographs of 10 things; 5,000 training and 1,000 test images of each."""

    batches: int = 5
    """how many of the five training batches of 10,000 images are read, from the first on"""

    def __post_init__(self) -> None:
        if not 1 <= self.batches <= 5:
            raise UsageError(f"CIFAR-10 has 5 training batches, got batches={self.batches}")

    def load(self, root: Path | None = None) -> Splits:
        binary = Files("cifar10", root, "cifar-10-batches-bin")
        files = Files("cifar10", root, "cifar-10-batches-py")
        if files.has("data_batch_1") or not binary.has("data_batch_1.bin"):
            classes = _names(files.file("batches.meta"), "label_names")
            parts = [
                _python(self._file(files, f"data_batch_{k}", k), "labels", f"training batch {k} of 5")
                for k in range(1, self.batches + 1)
            ]
            test = _python(files.file("test_batch"), "labels", "testing batch 1 of 1")
        else:
            files = binary
            classes = content(files.file("batches.meta.txt"), words, "class names")
            parts = [_binary(self._file(files, f"data_batch_{k}.bin", k), 1) for k in range(1, self.batches + 1)]
            test = _binary(files.file("test_batch.bin"), 1)
        for one, other in combinations([*parts, test], 2):  # binary batches do not say which they are
            if np.array_equal(one.x, other.x):
                raise UsageError(f"{one.path} and {other.path} hold the same images: put both in again")
        return files.splits(_joined(parts, classes), _joined([test], classes))

    def _file(self, files: Files, name: str, number: int) -> Path:
        fewer = f"read only the first {number - 1} with --data.source.batches {number - 1}"
        return files.file(name, remedy=fewer) if number > 1 else files.file(name)


@dataclass(frozen=True)
class CIFAR100:
    """60,000 photographs of 100 things; 500 training and 100 test images of each."""

    def load(self, root: Path | None = None) -> Splits:
        files = Files("cifar100", root, "cifar-100-python", "cifar-100-binary")
        if files.has("train") or not files.has("train.bin"):
            classes = _names(files.file("meta"), "fine_label_names")
            train = _python(files.file("train"), "fine_labels", "training batch 1 of 1")
            test = _python(files.file("test"), "fine_labels", "testing batch 1 of 1")
        else:
            classes = content(files.file("fine_label_names.txt"), words, "class names")
            train, test = (_binary(files.file(f"{name}.bin"), 2) for name in ("train", "test"))
        return files.splits(_joined([train], classes), _joined([test], classes))


def _names(path: Path, key: str) -> list[str]:
    meta = content(path, read_batch, "CIFAR's class names")
    try:
        return [name.decode("utf-8") if isinstance(name, bytes) else str(name) for name in meta[key]]
    except (KeyError, TypeError, UnicodeDecodeError):
        raise UsageError(f"{path} has no {key}: put CIFAR's own file in again") from None


def _python(path: Path, labels: str, expected: str) -> _Part:
    batch = content(path, read_batch, "a CIFAR batch")
    said = batch.get("batch_label", expected.encode())
    said = said.decode("latin1") if isinstance(said, bytes) else said
    if not isinstance(said, str) or said != expected:
        raise UsageError(
            f"{path} says of itself {said!r:.60}, expected is '{expected}': give each file its own name again"
        )
    x, y = batch.get("data"), batch.get(labels)
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != PIXELS or not isinstance(y, list):
        raise UsageError(
            f"{path} is no CIFAR batch: it lacks rows of {PIXELS} bytes as data, or {labels}; put it in again"
        )
    return _Part(path, x, y)


def _binary(path: Path, label_bytes: int) -> _Part:
    """Records of one label (CIFAR-100: coarse, then fine) and the pixels."""
    raw = content(path, bytes_of, "a binary CIFAR batch")
    record = label_bytes + PIXELS
    if len(raw) == 0 or len(raw) % record:
        raise UsageError(f"{path} is cut short: its {len(raw):,} bytes are no multiple of {record}; put it in again")
    rows = raw.reshape(-1, record)
    return _Part(path, rows[:, label_bytes:], rows[:, label_bytes - 1])


def _joined(parts: list[_Part], classes: list[str]) -> Images:
    sets = [labeled(part.path, part.x.reshape(-1, 3, 32, 32), part.y, classes) for part in parts]
    return Images(torch.cat([images.x[:] for images in sets]), torch.cat([images.y for images in sets]), tuple(classes))
