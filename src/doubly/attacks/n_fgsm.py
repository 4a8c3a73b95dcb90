"""N-FGSM (de Jorge et al. 2022): a sign step from strong noise, without projection onto the ball.

    noise ~ U(-k epsilon, k epsilon), cut to the image range;  delta = noise + reach * epsilon * sign(gradient there)

delta is cut to the image range only, so it leaves the ball by design, by up to k + reach radii. That keeps fast
training from overfitting to its own attack. It is for training; an accuracy under it says nothing about the ball.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import Tensor, nn

from doubly.attacks.attack import Attack
from doubly.attacks.mode import Mode, attack_context
from doubly.bilevel import Box, SignStep, projected_descent
from doubly.checks import check_scores, checked_call
from doubly.errors import UsageError
from doubly.losses import CrossEntropy, Loss, check_plain
from doubly.seeding import AnyGenerator, BatchGenerator
from doubly.threat import LinfBall, Threat, check_threat


@dataclass(frozen=True)
class NFGSM(Attack):
    """One sign step from a noisy image, for training only: delta may leave the ball, but not the image range.

    Raises:
        UsageError: If the noise is negative, the reach not positive, or the loss compares with clean logits.
    """

    threat: LinfBall = field(default_factory=LinfBall)
    """the ball, whose radius is epsilon; delta may leave it"""
    noise: float = 2.0
    """largest noise as a multiple of epsilon (k in the paper)"""
    reach: float = 1.0
    """step size as a multiple of epsilon"""
    loss: Loss = field(default_factory=CrossEntropy)
    """what the attacker increases"""
    attack_mode: Mode = "eval"
    """eval or train: see PGD; the released code uses train"""

    stays_inside: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_threat(self.threat, type(self).__name__)
        check_plain(self.loss, "N-FGSM")
        if self.noise < 0 or not self.reach > 0:
            raise UsageError(f"N-FGSM needs noise >= 0 and reach > 0, got {self.noise:g} and {self.reach:g}")

    def within(self, threat: Threat) -> Self:
        if not isinstance(threat, LinfBall):
            raise UsageError(f"N-FGSM is made for LinfBall, got {type(threat).__name__}: use at with PGD, or norm linf")
        return replace(self, threat=threat)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: AnyGenerator = None) -> Tensor:
        draws = BatchGenerator.of(generator)

        def inner(delta: Tensor) -> Tensor:
            logits = forward(x + delta)
            check_scores(logits, y)
            return -self.loss(logits, y)

        with checked_call(model, x, y), attack_context(model, self.attack_mode, x) as forward:
            start = self.noise * self.threat.radius * (2 * draws.uniform(x) - 1)
            return projected_descent(inner, start, Box(-x, 1 - x), SignStep(self.reach * self.threat.radius), 1)
