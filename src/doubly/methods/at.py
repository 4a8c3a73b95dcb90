"""Adversarial training (Madry et al. 2018; eq. 1 of the paper).

    mean loss(x + delta),   delta increases the loss of the attack

The attack is computed first; delta is a constant when the loss is differentiated.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, Attack, clean_logits
from doubly.checks import check_logits
from doubly.losses import CrossEntropy, Loss, sample_losses
from doubly.methods.method import DRAWS_CLASSES, WEIGHTS_BY_COUNTS, Method, require_counts
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class AT(Method):
    """Adversarial training: the mean loss at attacked images, mean loss(x + delta).

    Raises:
        UsageError: From `init`, if `balance` needs the number of images per class and they are missing.
    """

    attack: Attack = field(default_factory=PGD)
    """how delta is found"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized; one that compares with the clean logits (TRADES, MART) costs a pass more"""
    balance: Literal["none", "loss", "sampling"] = "none"
    """correction for class imbalance. loss: samples are weighted as if all classes were equally large;
    sampling: all classes are drawn equally often, as by the setting sampling of any run"""

    @property
    def class_balance(self) -> str | None:
        return {"none": None, "loss": WEIGHTS_BY_COUNTS, "sampling": DRAWS_CLASSES}[self.balance]

    def init(self, counts: Tensor | None = None) -> State:
        if self.balance == "none":
            return {}
        counts = require_counts(counts, f"balance {self.balance}")
        return {"counts": counts.double()}

    def sampling(self, state: State, progress: float = 0.0) -> Tensor | None:
        if self.balance != "sampling":
            return None
        present = (state["counts"] > 0).double()
        return present / present.sum()

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        return Perturbation(self.attack(model, batch.x, batch.y, step.generator("attack")))

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = sample_losses(self.loss, logits, batch.y, lambda: clean_logits(model, batch.x))
        weights = torch.ones_like(losses)
        if self.balance == "loss":  # their mean over the training set is 1
            counts = state["counts"].to(losses)
            weights = (counts.sum() / (counts > 0).sum() / counts)[batch.y]
        return Objective((weights * losses).mean(), losses.detach(), weights, logits.detach(), state)
