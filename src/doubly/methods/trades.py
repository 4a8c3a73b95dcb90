"""TRADES (Zhang, Yu, Jiao, Xing, El Ghaoui, Jordan 2019): the clean loss, and how far attacks move the prediction.

    mean CE(x) + beta KL(p(x) || p(x + delta)),   delta increases the KL

As published: beta 6, and the gradient goes through both arguments of the KL. The released code passes the clean images
twice and the attacked ones once in training mode, and batch norm's running statistics are updated by all three; here,
as for every method, only the attacked pass updates them.

AT is not a limit of TRADES. beta = 0 has the gradient of standard training (at the cost of an attack), beta -> inf that
of the KL alone. With attack_on cross_entropy it is AT with TradesLoss, which DONE reweights: DONE(loss=TradesLoss()).
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from doubly.attacks import PGD, clean_logits
from doubly.checks import check_logits
from doubly.losses import TradesLoss
from doubly.methods.method import Method
from doubly.types import Batch, Objective, Perturbation, State, TrainStep


@dataclass(frozen=True)
class TRADES(Method):
    """Cross-entropy at clean images, plus beta times the KL divergence between clean and attacked predictions."""

    attack: PGD = field(default_factory=lambda: PGD(start="gaussian"))
    """how delta is found; not from a start at zero, where the KL has no gradient"""
    beta: float = 6.0
    """weight of the KL; 0 is standard training"""
    attack_on: Literal["kl", "cross_entropy"] = "kl"
    """what the attack increases. kl: as published; cross_entropy: the attack's own loss, which is this by default"""

    def __post_init__(self) -> None:
        TradesLoss(self.beta)
        if self.attack_on == "kl":
            self.attack.check_divergence()

    def perturb(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Perturbation:
        attack = self.attack.maximize_divergence if self.attack_on == "kl" else self.attack
        return Perturbation(attack(model, batch.x, batch.y, step.generator("attack")))

    def objective(
        self, model: nn.Module, batch: Batch, state: State, step: TrainStep, perturbation: Perturbation | None = None
    ) -> Objective:
        delta, _ = perturbation or self.perturb(model, batch, state, step)
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        losses = TradesLoss(self.beta)(logits, batch.y, clean_logits(model, batch.x))
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), logits.detach(), state)
