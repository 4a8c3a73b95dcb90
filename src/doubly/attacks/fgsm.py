"""FGSM, the fast gradient sign method: one step, from the image or from a random start (Fast-AT's attack)."""

from dataclasses import dataclass, field

from torch import Tensor, nn

from doubly.attacks.attack import Attack
from doubly.attacks.mode import Mode
from doubly.attacks.pgd import PGD, Start
from doubly.losses import CrossEntropy, Loss, check_plain
from doubly.seeding import AnyGenerator
from doubly.threat import LinfBall, Threat, check_threat


@dataclass(frozen=True)
class FGSM(Attack):
    """One step of `reach` times the radius, the steepest in the norm of the threat: a sign step for LinfBall.

    Raises:
        UsageError: If the loss compares with clean logits.
    """

    threat: Threat = field(default_factory=LinfBall)
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
        check_threat(self.threat, type(self).__name__)
        check_plain(self.loss, "an attack")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator = None) -> Tensor:
        rule = self.threat.step_rule(self.reach * self.threat.radius)
        attack = PGD(self.threat, 1, rule, self.start, loss=self.loss, attack_mode=self.attack_mode)
        return attack(model, x, y, generator)
