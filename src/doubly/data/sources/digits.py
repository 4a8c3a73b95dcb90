"""The 1,797 handwritten digits that scikit-learn ships: 1x8x8, no download, a training run in seconds."""

from dataclasses import dataclass
from pathlib import Path

import torch

from doubly.data.holdout import stratified_folds
from doubly.data.images import DataSource, Images, Splits
from doubly.errors import UsageError
from doubly.settings import Settings


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
        from sklearn.datasets import load_digits

        source = load_digits()
        levels = torch.from_numpy(source.images)  # 0 to 16
        images = Images.of((levels * 255 / 16).round().to(torch.uint8), source.target, [str(k) for k in range(10)])
        folds = stratified_folds(images.y, self.folds, seed=0)
        test = folds.pop(self.fold)
        return Splits(train=images.subset(torch.cat(folds).sort().values), test=images.subset(test))
