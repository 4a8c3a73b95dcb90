"""The fast gradient sign method: one sign step, from the image or from a random start (Fast-AT's attack)."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from doubly.attacks.forward import Mode
from doubly.attacks.pgd import PGD, Start
from doubly.bilevel import SignStep
from doubly.losses import CrossEntropy, Loss, check_plain
from doubly.threat import LinfBall


@dataclass(frozen=True)
class FGSM:
    """One sign step of `reach` times the radius."""

    threat: LinfBall = field(default_factory=LinfBall)
    """what the attacker may do"""
    reach: float = 1.0
    """step size as a multiple of epsilon; 1.25 with a uniform start is Fast-AT"""
    start: Start = "zero"
    """zero: at the image itself; uniform: at random inside the threat's set"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what the attacker increases"""
    attack_mode: Mode = "eval"
    """eval or train: see PGD"""

    def __post_init__(self) -> None:
        check_plain(self.loss, "an attack")

    def scaled(self, share: float) -> "FGSM":
        """The attack within `share` of the radius."""
        return replace(self, threat=self.threat.scaled(share))

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        rule = SignStep(self.reach * self.threat.radius)
        attack = PGD(self.threat, 1, rule, self.start, loss=self.loss, attack_mode=self.attack_mode)
        return attack(model, x, y, generator)
