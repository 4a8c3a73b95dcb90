"""The vocabulary: a dataset gives a `Batch`, a method turns it into an `Objective`, the loop steps."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from doubly import seeding

State = dict[str, Tensor]  # what a part remembers; goes into the checkpoint as it is


class Batch(NamedTuple):
    """Images in [0,1], their labels, and their positions in the source's set."""

    x: Tensor  # (B, C, H, W)
    y: Tensor  # (B,)
    ids: Tensor = torch.empty(0, dtype=torch.int64)  # (B,); only methods that remember samples need them


@dataclass(frozen=True)
class Objective:
    """What a method makes of a batch: `loss.backward()` gives the update direction, the rest is for the record."""

    loss: Tensor  # ()
    sample_losses: Tensor  # (B,) detached
    weights: Tensor  # (B,) detached; 1 everywhere for plain averages
    logits: Tensor  # (B, classes) detached
    state: State
    record: dict[str, Tensor] = field(default_factory=dict)  # further numbers, each (), averaged into the epoch's line


class TrainStep(NamedTuple):
    """Where training stands, and the randomness that belongs to this step."""

    epoch: int = 0
    step: int = 0
    progress: float = 0.0  # share of training done, in [0,1)
    seed: int = 0

    def generator(self, purpose: str) -> torch.Generator:
        return seeding.generator(self.seed, self.epoch, self.step, purpose)


@runtime_checkable
class Attack(Protocol):
    """Returns delta, inside the threat's set around x."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor: ...


@runtime_checkable
class Method(Protocol):
    """A way to train: the objective of one batch, and what it remembers between batches."""

    def init(self, counts: Tensor | None = None) -> State:
        """What it remembers before the first batch. `counts`: training images per class, for methods that need them."""
        ...

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective: ...

    def sampling(self, state: State) -> Tensor | None:
        """Class probabilities for the loader (class-level online learning), or None for one pass over the data."""
        ...
