"""AT-BSL, adversarial training with the balanced softmax loss (Yue, Mou, Wang and Zhao 2024), for imbalanced classes.

    mean CE(z(x + delta) + tau log n, y),   n the training images per class,   delta increases the loss of the attack

Training with log n added teaches the network scores that fit classes of equal size; they are not added at test time.
delta follows from the network as it is, without log n. tau is the strength of logit adjustment; published: 1.

A class without training images counts as one image, so that its score stays finite and is learned to be low. The
RandAugment that the authors combine with the loss is left out, since augmentation is a setting of the data. tau = 0,
and classes of equal size, are AT exactly.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, Attack
from doubly.checks import check_logits
from doubly.errors import UsageError
from doubly.losses import CrossEntropy
from doubly.methods.method import Method, require_counts
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class ATBSL(Method):
    """Adversarial training with logits adjusted by the logarithm of the class counts.

    Raises:
        UsageError: If settings are out of range or do not fit each other.
    """

    attack: Attack = field(default_factory=PGD)
    """how delta is found, on the network without adjustment"""
    tau: float = 1.0
    """strength of the adjustment; 0 is AT"""

    def __post_init__(self) -> None:
        if not 0 <= self.tau < float("inf"):
            raise UsageError(f"tau scales the logarithm of the counts, a number from 0 on, got {self.tau:g}: try 1")

    @property
    def class_balance(self) -> str | None:
        return "adjusts logits by the class counts" if self.tau else None

    def init(self, counts: Tensor | None = None) -> State:
        counts = require_counts(counts, "AT-BSL")
        return {"counts": counts.double()}

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        return Perturbation(self.attack(model, batch.x, batch.y, step.generator("attack")))

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        adjustment = self.adjustment(state["counts"]).to(torch.promote_types(logits.dtype, torch.float32))
        losses = CrossEntropy()(logits + adjustment, batch.y)
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), logits.detach(), state)

    def adjustment(self, counts: Tensor) -> Tensor:
        """Return what is added to the logits, (classes,): tau log(n_c / n_max), where n_max cancels in the softmax."""
        counts = counts.clamp_min(1)
        return self.tau * (counts / counts.max()).log()
