"""A dataset of your own: any class with a method `load(root)` that returns `Splits`. Here, a table of pixels."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sklearn.datasets
import torch
from torch import nn

from doubly import DONE, PGD, Images, LinfBall, evaluate, train
from doubly.data import Splits
from doubly.data.holdout import holdout


@dataclass(frozen=True)
class PixelTable:
    """A CSV file with one gray image per line, row by row, and its label in the last column."""

    file: str = "digits.csv.gz"
    """the file, inside the data root"""
    levels: int = 16
    """value of a white pixel"""
    test_share: float = 0.2
    """part of each class that is the test set; always the same images"""

    def load(self, root: Path | None) -> Splits:
        table = np.loadtxt((root or Path()) / self.file, delimiter=",")
        side = int((table.shape[1] - 1) ** 0.5)
        pixels = (table[:, :-1] / self.levels).reshape(-1, 1, side, side)  # floats in [0,1], or uint8
        images = Images.of(pixels, table[:, -1].astype(int))  # class names are an optional third argument
        train, test = holdout(images.y, self.test_share, seed=0)
        return Splits(train=images.subset(train), test=images.subset(test))


if __name__ == "__main__":
    splits = PixelTable().load(Path(sklearn.datasets.__file__).parent / "data")  # where scikit-learn keeps its digits
    print(f"{len(splits.train)} images to train on, by class {splits.train.counts().tolist()}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    train(model, splits.train, DONE(PGD(LinfBall(0.1)), cap=5.0), epochs=10)
    result = evaluate(model, splits.test, LinfBall(0.1))
    print(f"accuracy {result.sa:.1%}, under attack {result.ra_pgd:.1%}, weakest classes {result.ra_tail_30:.1%}")
