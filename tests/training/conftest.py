"""A problem so small that a run takes a fraction of a second: three classes of 4x4 images, one bright row each."""

from pathlib import Path

import pytest
import torch
from torch import nn

from doubly.attacks import PGD
from doubly.bilevel import SignStep
from doubly.checkpoints.files import load
from doubly.config import SGD, Data, Run, Validation
from doubly.config.user_code import GivenData, GivenModel
from doubly.data import Images, Splits
from doubly.errors import Interrupted
from doubly.methods import AT, Standard
from doubly.schedules import Constant
from doubly.threat import LinfBall
from doubly.training.loop import train_run

ATTACK = PGD(LinfBall(0.1), 2, SignStep(0.05))
STEPS = 4  # per epoch of the tiny run, without hold-out


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bright_rows(n: int, seed: int) -> Images:
    y = torch.arange(n) % 3
    x = 0.6 * torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    x[torch.arange(n), 0, y] += 0.3
    return Images.of(x, y)


@pytest.fixture
def splits() -> Splits:
    return Splits(bright_rows(60, seed=1), bright_rows(30, seed=2))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


class Tiny:
    """Trains the tiny problem; a new network each time, always from the same weights."""

    attack, steps = ATTACK, STEPS

    def __init__(self, splits: Splits) -> None:
        self.splits, self.network = splits, linear

    def run(self, method=None, holdout=0.0, validation=None, optimizer=None, **changes) -> Run:
        settings = {"epochs": 3, "batch": 16, "device": "cpu", "channels_last": "no", **changes}
        return Run(
            Data(GivenData(), holdout=holdout),
            GivenModel(),
            method or Standard(),
            optimizer or SGD(lr=Constant(0.1)),
            validation or Validation(every=2, size=30, attack=ATTACK),
            **settings,
        )

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return self.network()

    def train(self, run: Run, output: Path | None = None, **options) -> nn.Module:
        options = {"splits": self.splits, "model": self.model(), **options}
        return train_run(run, output, **options)

    def stopped(self, run: Run, output: Path, after: int, **options) -> None:
        """Train until `after` steps are done from here on."""
        count = iter(range(1, 10**6))
        with pytest.raises(Interrupted):
            self.train(run, output, stop=lambda: next(count) == after, **options)

    @staticmethod
    def checkpoint(output: Path, name: str = "last"):
        """(every tensor by group/name, info)"""
        tensors, info = load(output / "checkpoints" / name)
        return {f"{group}/{key}": value for group, part in tensors.items() for key, value in part.items()}, info


@pytest.fixture
def tiny(splits) -> Tiny:
    return Tiny(splits)


@pytest.fixture
def adversarial():
    return AT(ATTACK)


@pytest.fixture
def same_bits():
    def compare(one, other) -> bool:
        return one.keys() == other.keys() and all(
            one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
        )

    return compare
