"""A problem so small that a run takes a fraction of a second: three classes of 4x4 images, one bright row each."""

from pathlib import Path

import pytest
import torch
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.checkpoints import load_checkpoint
from doubly.config import SGD, Data, Run, Validation
from doubly.config.user_code import InMemoryData, InMemoryModel
from doubly.data import Images, Splits
from doubly.errors import Interrupted
from doubly.methods import Standard
from doubly.schedules import Constant
from doubly.threat import LinfBall
from doubly.training.loop import train_run


def bright_rows(n: int, seed: int) -> Images:
    """Return n images of noise, each with one brighter row that tells its class."""
    y = torch.arange(n) % 3
    x = 0.6 * torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    x[torch.arange(n), 0, y] += 0.3
    return Images.of(x, y)


class Tiny:
    """Trains the tiny problem; a new network each time, always from the same weights."""

    attack = PGD(LinfBall(0.1), 2, SignStep(0.05))
    steps = 4  # per epoch, without a hold-out

    def __init__(self) -> None:
        self.splits = Splits(bright_rows(60, seed=1), bright_rows(30, seed=2))

    @staticmethod
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def run(self, method=None, holdout=0.0, validation=None, optimizer=None, **changes) -> Run:
        settings = {"epochs": 3, "batch_size": 16, "device": "cpu", "channels_last": "no", **changes}
        return Run(
            Data(InMemoryData(), holdout=holdout),
            InMemoryModel(),
            method or Standard(),
            optimizer or SGD(lr=Constant(0.1)),
            validation or Validation(every=2, size=30, attack=self.attack),
            **settings,
        )

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return self.network()

    def train(self, run: Run, output: Path | None = None, **options) -> nn.Module:
        options = {"splits": self.splits, "model": self.model(), **options}
        return train_run(run, output, **options).model

    def stopped(self, run: Run, output: Path, after: int, **options) -> None:
        """Train `after` steps, then stop and save."""
        count = iter(range(1, 10**6))
        with pytest.raises(Interrupted):
            self.train(run, output, stop=lambda: next(count) == after, **options)

    @staticmethod
    def checkpoint(output: Path, name: str = "last"):
        """Return every tensor by group/name, and the info."""
        tensors, info = load_checkpoint(output / "checkpoints" / name)
        return {f"{group}/{key}": value for group, part in tensors.items() for key, value in part.items()}, info
