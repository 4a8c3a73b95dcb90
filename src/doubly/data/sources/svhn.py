"""SVHN (Netzer et al., 2011), cropped house numbers: MATLAB files in which the digit 0 has the label 10."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from doubly.data.download.dataset_files import DatasetFiles, labeled_images, read_file
from doubly.data.images import DataSource, Images, Splits
from doubly.data.sources.matlab import read_matrices
from doubly.errors import UsageError
from doubly.settings import Settings

DIGITS = [str(digit) for digit in range(10)]


@dataclass(frozen=True)
class SVHN(Settings, DataSource):
    """99,289 digits from house numbers, 32x32, in color; ones are three times as frequent as nines."""

    def load(self, root: Path | None = None) -> Splits:
        files = DatasetFiles("svhn", root, "svhn")
        return files.splits(*(_read_images(files.file(f"{part}_32x32.mat")) for part in ("train", "test")))


def _read_images(path: Path) -> Images:
    matrices = read_file(path, lambda file: read_matrices(file, ["X", "y"]), "a MATLAB file")
    x, y = matrices.get("X"), matrices.get("y")
    if x is None or y is None or x.ndim != 4 or x.shape[:3] != (32, 32, 3) or x.dtype != "uint8":
        raise UsageError(f"{path} is no cropped SVHN file: it lacks X of 32x32x3xN bytes, or y; fetch train_32x32.mat")
    if y.dtype.kind not in "iuf" or not np.isin(y, range(1, 11)).all():
        raise UsageError(f"{path} has labels other than SVHN's 1 to 10 (10 is a zero): replace it with the original")
    return labeled_images(path, x.transpose(3, 2, 0, 1), y.reshape(-1).astype(np.int64) % 10, DIGITS)
