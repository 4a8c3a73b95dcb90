"""Group DRO (Sagawa, Koh, Hashimoto and Liang 2020) on attacked images, with classes as groups.

    sum_c q_c L_c,   L_c the mean loss at x + delta of class c
    q_c proportional to q_c exp(eta (L_c + adjustment / sqrt n_c)), once per batch, before it weighs the batch

n_c is the number of training images of the class; the adjustment allows for the larger generalization gap of small
classes. Weights of samples are q_y N / n_y, N the number of all training images: the mean over a batch then estimates
the sum without bias, whichever classes are in it. Released code takes class means of the batch instead, where a class
without images counts as one of loss 0, and so loses weight. Here such a class keeps its q, and the others share theirs.

q begins uniform over the classes with images. eta = 0 is AT with balance loss; with classes of equal size, AT.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, Attack, clean_logits, frozen_statistics
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, sample_losses
from doubly.methods.method import WEIGHTS_BY_COUNTS, Method, require_counts
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class GroupDRO(Method):
    """Adversarial training on a mixture of classes that moves toward those with the largest loss.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: Attack = field(default_factory=PGD)
    """how delta is found"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what is minimized; one that compares with the clean logits (TRADES, MART) costs a pass more"""
    eta: float = 0.01
    """step size of q per batch; 0 gives all classes the same weight"""
    adjustment: float = 0.0
    """added to the loss of a class for q, divided by the square root of its number of images"""

    def __post_init__(self) -> None:
        if not (0 <= self.eta < float("inf") and 0 <= self.adjustment < float("inf")):
            raise UsageError(
                f"eta and adjustment are numbers from 0 on, got eta={self.eta:g}, adjustment={self.adjustment:g}: "
                "published are eta 0.01 and adjustments from 0 to 5"
            )

    @property
    def class_balance(self) -> str | None:
        return WEIGHTS_BY_COUNTS

    def init(self, counts: Tensor | None = None) -> State:
        counts = require_counts(counts, "group DRO")
        present = counts > 0
        return {"counts": counts.double(), "log_q": (present.double() / present.sum()).log()}

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        return Perturbation(self.attack(model, batch.x, batch.y, step.generator("attack")))

    def shared_values(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation
    ) -> Tensor:
        with torch.no_grad(), frozen_statistics(model):
            logits = model(batch.x + perturbation.delta)
            losses = sample_losses(self.loss, logits, batch.y, lambda: clean_logits(model, batch.x))
        return _sample_values(losses, batch.y)

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = sample_losses(self.loss, logits, batch.y, lambda: clean_logits(model, batch.x))
        values = step.communicator.all_gather(_sample_values(losses, batch.y))
        log_q = self.updated(state["log_q"], state["counts"], values[:, 1].contiguous(), values[:, 0].long())
        weights = (log_q.exp() * state["counts"].sum() / state["counts"]).to(losses)[batch.y]
        record = {"largest_class_probability": log_q.exp().max()}
        new_state = {"counts": state["counts"], "log_q": log_q}
        return Objective((weights * losses).mean(), losses.detach(), weights, logits.detach(), new_state, record)

    def updated(self, log_q: Tensor, counts: Tensor, losses: Tensor, y: Tensor) -> Tensor:
        """Return log q after a batch, (classes,).

        Args:
            log_q: log q before it.
            counts: Number of training images per class.
            losses: Loss of each sample of the whole batch.
            y: Their labels.
        """
        sums, images = (torch.zeros_like(log_q).index_add(0, y, v) for v in (losses, torch.ones_like(losses)))
        present = images > 0
        moved = log_q + self.eta * (sums / images + self.adjustment / counts.sqrt())
        before, after = (v.masked_fill(~present, -torch.inf).logsumexp(0) for v in (log_q, moved))
        return torch.where(present, moved - after + before, log_q)


def _sample_values(losses: Tensor, y: Tensor) -> Tensor:
    """Return label and loss of each sample, (B, 2)."""
    return torch.stack([y.double(), losses.detach().double()], 1)
