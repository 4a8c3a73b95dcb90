"""Adversarial training (Madry et al. 2018; eq. 1 of the paper): the mean loss at the attacked images."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, clean_pass
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, PairedLoss
from doubly.types import Attack, Batch, Objective, State, TrainStep


@dataclass(frozen=True)
class AT:
    """mean loss(x + delta), delta by the attack."""

    attack: Attack = field(default_factory=PGD)
    """how delta is found"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized; one that compares with the clean logits (TRADES, MART) costs a pass more"""
    balance: Literal["none", "loss", "sampling"] = "none"
    """against imbalance. loss: samples weigh as if all classes were equally large; sampling: classes are drawn alike"""

    def init(self, counts: Tensor | None = None) -> State:
        if self.balance == "none":
            return {}
        if counts is None:
            raise UsageError(f"balance {self.balance} needs the training images per class: init(images.counts())")
        return {"counts": counts.double()}

    def sampling(self, state: State) -> Tensor | None:
        if self.balance != "sampling":
            return None
        present = (state["counts"] > 0).double()
        return present / present.sum()

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        delta = self.attack(model, batch.x, batch.y, step.generator("attack"))
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        if isinstance(self.loss, PairedLoss):
            losses = self.loss(logits, batch.y, clean_pass(model, batch.x))
        else:
            losses = self.loss(logits, batch.y)
        weights = torch.ones_like(losses)
        if self.balance == "loss":  # of mean 1 over the training set
            counts = state["counts"].to(losses)
            weights = (counts.sum() / (counts > 0).sum() / counts)[batch.y]
        return Objective((weights * losses).mean(), losses.detach(), weights, logits.detach(), state)
