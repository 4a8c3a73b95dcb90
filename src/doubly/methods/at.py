"""Adversarial training (Madry et al. 2018; eq. 1 of the paper): the mean loss at the attacked images."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from doubly.attacks import PGD
from doubly.checks import check_logits
from doubly.losses import CrossEntropy, Loss
from doubly.types import Attack, Batch, Moment, Objective, State


@dataclass(frozen=True)
class AT:
    """mean loss(x + delta), delta by the attack."""

    attack: Attack = field(default_factory=PGD)
    """how delta is found"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimised"""

    def init(self) -> State:
        return {}

    def sampling(self, state: State) -> Tensor | None:
        return None

    def objective(self, model: nn.Module, batch: Batch, state: State, moment: Moment) -> Objective:
        delta = self.attack(model, batch.x, batch.y, moment.generator("attack"))
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = self.loss(logits, batch.y)
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), logits.detach(), state)
