"""TRADES (Zhang, Yu, Jiao, Xing, El Ghaoui, Jordan 2019): the loss at the image, and how far attacks move the answer.

    mean CE(x) + beta KL(p(x) || p(x + delta)),   delta increases the KL

As published: beta 6, and the gradient goes through both arguments of the KL. The released code passes the clean images
twice and the attacked ones once in training mode, and batch norm remembers all three; here, as for every method, it
remembers the attacked pass alone. The attack's p(x) is computed once, with the network as it is while attacked, which
equals computing it anew in each step.

AT is no limit of it. beta = 0 has the gradient of standard training (at the cost of an attack), beta -> inf the KL's
alone. With attack_on cross_entropy it is AT with TradesLoss, which DONE reweights: DONE(loss=TradesLoss()).
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from doubly.attacks import PGD, clean_pass
from doubly.checks import check_logits
from doubly.losses import TradesLoss
from doubly.types import Batch, Objective, State, TrainStep


@dataclass(frozen=True)
class TRADES:
    """mean CE(x) + beta * KL(p(x) || p(x + delta)), delta by an attack on the KL."""

    attack: PGD = field(default_factory=lambda: PGD(start="gaussian"))
    """how delta is found; not from a start at zero, where the KL has no gradient"""
    beta: float = 6.0
    """weight of the KL; 0 is standard training"""
    attack_on: Literal["kl", "cross_entropy"] = "kl"
    """what the attack increases. kl: as published; cross_entropy: the attack's own loss, this unless changed"""

    def __post_init__(self) -> None:
        TradesLoss(self.beta)
        if self.attack_on == "kl":
            self.attack.check_diverge()

    def init(self, counts: Tensor | None = None) -> State:
        return {}

    def sampling(self, state: State) -> Tensor | None:
        return None

    def objective(self, model: nn.Module, batch: Batch, state: State, step: TrainStep) -> Objective:
        attack = self.attack.diverge if self.attack_on == "kl" else self.attack
        delta = attack(model, batch.x, batch.y, step.generator("attack"))
        logits = model(batch.x + delta)
        check_logits(logits, batch.y)
        clean = clean_pass(model, batch.x)
        losses = TradesLoss(self.beta)(logits, batch.y, clean)
        return Objective(losses.mean(), losses.detach(), torch.ones_like(losses), logits.detach(), state)
