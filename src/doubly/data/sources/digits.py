"""The 1,797 handwritten digits that scikit-learn ships: 1x8x8, no download, a training run in seconds."""

import gzip
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from doubly.data.holdout import stratified_folds
from doubly.data.images import DataSource, Images, Splits
from doubly.errors import UsageError
from doubly.settings import Settings


def read_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return the gray levels from 0 to 16, (1797, 8, 8), and the labels.

    The file is read without importing scikit-learn, which takes a second; if it is not where it was, scikit-learn reads
    it.
    """
    package = find_spec("sklearn")
    file = Path((package.submodule_search_locations or ["."])[0] if package else ".") / "datasets/data/digits.csv.gz"
    try:
        with gzip.open(file, "rt") as lines:
            table = np.loadtxt(lines, delimiter=",")
        return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    except (OSError, ValueError):
        from sklearn.datasets import load_digits

        source = load_digits()
        return source.images, source.target


@dataclass(frozen=True)
class Digits(Settings, DataSource):
    """1,797 handwritten digits, 8x8, gray. One fold is the test set; the ids are positions in the full set."""

    fold: int = 0
    """which fold is the test set"""
    folds: int = 5
    """number of stratified folds; the cut is always the same"""

    def __post_init__(self) -> None:
        if not (self.folds >= 2 and 0 <= self.fold < self.folds):
            raise UsageError(f"digits have 2 or more folds, counted from 0; got fold={self.fold} of folds={self.folds}")

    def load(self, root: Path | None = None) -> Splits:
        levels, labels = read_digits()
        pixels = (torch.from_numpy(levels) * 255 / 16).round().to(torch.uint8)
        images = Images.of(pixels, labels, [str(k) for k in range(10)])
        folds = stratified_folds(images.y, self.folds, seed=0)
        test = folds.pop(self.fold)
        return Splits(train=images.subset(torch.cat(folds).sort().values), test=images.subset(test))
