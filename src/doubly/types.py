"""The data that flow through training: batches, steps, perturbations and objectives."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from doubly import seeding
from doubly.distributed.collectives import SINGLE_PROCESS, Communicator
from doubly.seeding import BatchGenerator, Rows

State = dict[str, Tensor]  # what a method remembers between batches; saved in the checkpoint as it is


class Batch(NamedTuple):
    """Images with their labels.

    Attributes:
        x: Images in [0, 1], (B, C, H, W).
        y: Labels, (B,).
        ids: Positions of the images in their dataset, (B,); only methods that remember samples need them.
    """

    x: Tensor
    y: Tensor
    ids: Tensor = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Objective:
    """The objective of a method on a batch: `loss.backward()` gives the update direction, the rest is recorded.

    Attributes:
        loss: The number to differentiate, ().
        sample_losses: Loss of each sample, (B,), detached.
        weights: Weight of each sample, (B,), detached; 1 everywhere for plain averages.
        logits: Logits of the images that were trained on, (B, classes), detached.
        state: The method's state after this batch.
        record: Further numbers, each (), averaged over the epoch.
    """

    loss: Tensor
    sample_losses: Tensor
    weights: Tensor
    logits: Tensor
    state: State
    record: dict[str, Tensor] = field(default_factory=dict)


class TrainStep(NamedTuple):
    """A step of training: its position, its random numbers, and the processes that share it.

    Attributes:
        epoch: Number of the epoch, from 0.
        step: Number of the step in the epoch, from 0.
        progress: Share of training done, in [0, 1).
        seed: Seed of the run.
        communicator: The processes that share the global batch.
        rows: Where the rows of this batch lie in the global batch; None if it is the global batch.
        stream: Number of this batch among those that processes and microbatches split a global batch into; dropout
            draws other numbers in each.
    """

    epoch: int = 0
    step: int = 0
    progress: float = 0.0
    seed: int = 0
    communicator: Communicator = SINGLE_PROCESS
    rows: Rows | None = None
    stream: int = 0

    def generator(self, purpose: str) -> BatchGenerator:
        """Return the random numbers of this step for one `purpose`, such as "attack"."""
        return BatchGenerator(seeding.generator(self.seed, self.epoch, self.step, purpose), self.rows)

    def network_rng(self) -> AbstractContextManager[None]:
        """Return a context in which torch's global generators, which dropout draws from, are seeded for this step."""
        purpose = "network" if self.stream == 0 else f"network/{self.stream}"
        return seeding.global_generators(seeding.derived_seed(self.seed, self.epoch, self.step, purpose))


class Perturbation(NamedTuple):
    """The perturbations that an attack returned for a batch.

    Attributes:
        delta: The perturbations.
        values: Further values per sample that the method took from the attack.
    """

    delta: Tensor
    values: dict[str, Tensor] = {}  # noqa: RUF012 - never changed
