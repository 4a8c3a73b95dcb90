"""SVHN (Netzer et al., 2011), cropped house numbers: MATLAB files in which the digit 0 has the label 10."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from doubly.data.files import Files, content, labeled
from doubly.data.images import Images, Splits
from doubly.errors import UsageError

DIGITS = [str(digit) for digit in range(10)]


@dataclass(frozen=True)
class SVHN:
    """99,289 digits from house numbers, 32x32, in color; ones are three times as frequent as nines."""

    def load(self, root: Path | None = None) -> Splits:
        files = Files("svhn", root, "svhn")
        return files.splits(*(_images(files.file(f"{part}_32x32.mat")) for part in ("train", "test")))


def _images(path: Path) -> Images:
    found = content(path, _matrices, "a MATLAB file")
    x, y = found.get("X"), found.get("y")
    if x is None or y is None or x.ndim != 4 or x.shape[:3] != (32, 32, 3) or x.dtype != "uint8":
        raise UsageError(f"{path} is no cropped SVHN file: it lacks X of 32x32x3xN bytes, or y; fetch train_32x32.mat")
    if y.dtype.kind not in "iuf" or not np.isin(y, range(1, 11)).all():
        raise UsageError(f"{path} has labels other than SVHN's 1 to 10, 10 being a zero: put the original in again")
    return labeled(path, x.transpose(3, 2, 0, 1), y.reshape(-1).astype(np.int64) % 10, DIGITS)


def _matrices(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    found: dict[str, Any] = loadmat(path, variable_names=["X", "y"])
    return found
