"""MART, misclassification-aware adversarial training (Wang, Zou, Yi, Bailey, Ma, Gu 2020).

    mean BCE(x + delta) + beta KL(p(x) || p(x + delta)) (1 - p_y(x)),   delta increases the cross-entropy
    BCE = -log p_y - log(1 - max_{j != y} p_j)

The KL counts most where the clean image is misclassified. As released, that factor 1 - p_y is not a constant: the
gradient goes through it (`detached` makes it one), and through both arguments of the KL. beta is 5 for ResNet-18, 6 for
wide networks.

beta = 0 is AT with the boosted cross-entropy BCE, which is AT's plus a term for the runner-up class. The whole is AT
with MartLoss, which DONE reweights: DONE(loss=MartLoss()).
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from doubly.attacks import PGD, Attack, clean_logits
from doubly.checks import check_logits
from doubly.losses import MartLoss
from doubly.methods.method import Method
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class MART(Method):
    """Boosted cross-entropy at attacked images, plus a KL term that counts most where the clean image is wrong."""

    attack: Attack = field(default_factory=lambda: PGD(start="gaussian"))
    """how delta is found"""
    beta: float = 5.0
    """weight of the KL; 0 is AT with the boosted cross-entropy"""
    detached: bool = False
    """whether 1 - p_y is a constant weight; as released it is not, and its gradient counts"""

    def __post_init__(self) -> None:
        MartLoss(self.beta)

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        return Perturbation(self.attack(model, batch.x, batch.y, step.generator("attack")))

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = MartLoss(self.beta, self.detached)(logits, batch.y, clean_logits(model, batch.x))
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), logits.detach(), state)
